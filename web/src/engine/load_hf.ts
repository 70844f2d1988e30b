/** Import the chunk of Hugging Face formats. Bundlers copy it as a file and keep this import unchanged (build.mjs). */
export const loadHf = (): Promise<typeof import("../models/hf.js")> => import(new URL("./hf.js", import.meta.url).href);
