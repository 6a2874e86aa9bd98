// One stream of changes for all tabs: import {live} from "/static/live.js"; live.on(change => …)
export const live = { on() {}, onState() {} };
