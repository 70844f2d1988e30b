/** Hugging Face formats: model folders and PEFT adapters. A separate chunk, loaded on first use. */
export { toFloats } from "../files/safetensors.js";
export { adapterFiles, locateModules, readAdapter } from "./adapters.js";
export { describeFolder, hasTemplate, openFolder, readTokenizerFiles } from "./folder.js";
