/** Public types of a request for completions, and of its tokens. */
import type { Message, PromptOptions } from "../text/tokenizer.js";
import type { Sampling } from "./sampling.js";

export interface Signal {
  /** Signal that aborts the call, which then rejects with the signal's reason. */
  signal?: AbortSignal;
}

export interface GenerateOptions extends Sampling, PromptOptions, Signal {
  /** Number of samples. Default: 1. */
  n?: number;
  /** Number that loadAdapter returned. Default: the base model. */
  adapter?: number;
  /** Key of the random numbers, together with the seed and the sample's index. Default: 0. */
  promptIndex?: number;
}

/** Text, messages for the model's chat template, or token ids. */
export type Prompt = string | readonly Message[] | ArrayLike<number>;

export interface Token {
  /** Index of the sample, below n. */
  sample: number;
  token: number;
  /** Characters that the token completes. Empty for special tokens and without a tokenizer. With `stop`, a possible start of a stop string is withheld. */
  text: string;
  /** Log-prob under the distribution that the token was sampled from. */
  logprob: number;
  /** With `topLogprobs`: the most probable tokens of the same distribution in descending order; tokens of probability 0 are excluded. */
  topLogprobs?: { token: number; logprob: number }[];
  /** Reason why the sample ended, on its last token. */
  finish?: "stop" | "length";
}
