// Every page runs this: theme, keys, action buttons, copying, ages, and live parts.
import "/static/theme.js";
import "/static/keys.js";
import "/static/act.js";
import "/static/ages.js";
import "/static/parts.js";
import "/static/indicator.js";
