/** Whet's engine for browsers, Node, Deno and Bun: runs GGUF files and Hugging Face folders on the core's WebAssembly build. */
export { OutOfMemoryError, WhetError } from "./core/errors.js";
export { Chat } from "./engine/chat.js";
export { Engine } from "./engine/engine.js";
export type { Estimate, Info, LoadOptions } from "./engine/protocol.js";
export { clearCache, listCache } from "./files/cache.js";
export type { FileOptions, Progress } from "./files/reader.js";
export type { Source, Sources } from "./files/sources.js";
export type { Learner } from "./learner/learner.js";
export type { Completion, GrpoOptions, GrpoRow, LearnerOptions, LearnProgress, RunOptions, SftRow, StepOptions } from "./learner/options.js";
export { deleteAdapter, listAdapters, openAdapter } from "./learner/saved.js";
export type { GenerateOptions, Prompt, Token } from "./settings/requests.js";
export type { Sampling } from "./settings/sampling.js";
export type { Message, PromptOptions } from "./text/tokenizer.js";
