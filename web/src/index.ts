/** Whet's engine for browsers, Node, Deno and Bun: runs GGUF files and Hugging Face folders on the core's WebAssembly build. */
export { clearCache, listCache } from "./cache.js";
export { Chat } from "./chat.js";
export { Engine, type GenerateOptions } from "./engine.js";
export { OutOfMemoryError, WhetError } from "./errors.js";
export type { Estimate, FileOptions, Info, LoadOptions, Prompt, PromptOptions, Token } from "./protocol.js";
export type { Sampling } from "./sampling.js";
export type { Progress, Source, Sources } from "./sources.js";
export type { Message } from "./tokenizer.js";
