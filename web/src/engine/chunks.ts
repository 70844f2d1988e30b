/** Imports of the worker's chunks on first use. Bundlers copy them as files and keep these imports unchanged (build.mjs). */

/** Hugging Face formats. */
export const loadHf = (): Promise<typeof import("../models/hf.js")> => import(new URL("./hf.js", import.meta.url).href);
/** The GPU. */
export const loadGpu = (): Promise<typeof import("../gpu/program.js")> => import(new URL("./gpu.js", import.meta.url).href);
/** The worker's part of a learner. */
export const loadLearner = (): Promise<typeof import("../learner/host.js")> => import(new URL("./learner.js", import.meta.url).href);
