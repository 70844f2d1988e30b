/** A thread of the engine's pool: it never returns from the core, and ends when it is terminated. */
import { Core } from "./core.js";
import { parent } from "./port.js";

const port = parent();
port.onMessage((thread) => void Core.runThread(thread, () => port.postMessage({ ready: true })));
