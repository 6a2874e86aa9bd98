// What every page runs: the theme, keys, buttons that act, copying, ages, and parts that keep themselves up to date.
import "/static/theme.js";
import "/static/keys.js";
import "/static/act.js";
import "/static/ages.js";
import "/static/parts.js";
import "/static/indicator.js";
