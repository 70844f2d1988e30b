/** Hugging Face formats: model folders and PEFT adapters. A separate chunk, loaded on first use. */
export { adapterFiles, readAdapter, TARGETS } from "./adapters.js";
export { describeFolder, hasTemplate, openFolder, readFolderTokenizer } from "./folder.js";
export { toFloats } from "./safetensors.js";
