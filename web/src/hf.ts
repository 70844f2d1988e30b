/** What Hugging Face's libraries save: folders of models, and PEFT's adapters. A script by itself, which is loaded when the
 * first of these comes. */
export { adapterFiles, readAdapter, TARGETS } from "./adapters.js";
export { describeFolder, hasTemplate, openFolder, readFolderTokenizer } from "./folder.js";
export { toFloats } from "./safetensors.js";
