/** Conversation: its messages and the engine that replies. The engine reuses the KV cache of earlier turns.
 *
 * As in `whet chat`, every reply is sampled with its own seed, and the oldest turns are dropped when the context is full. */
import { show, WhetError } from "../core/errors.js";
import type { GenerateOptions, Prompt, Token } from "../settings/requests.js";
import { addToSeed, DEFAULTS } from "../settings/sampling.js";
import type { Message, PromptOptions } from "../text/tokenizer.js";
import type { Measure } from "./protocol.js";

const REPLY_DIVISOR = 4; // a quarter of the context is reserved for the reply, or maxNewTokens if that is less
// A dropped turn invalidates the KV cache behind it, so several are dropped at once: until the prompt takes this share.
const SHARE_AFTER_DROP = 0.75;

/** The Engine's methods that a Chat calls. */
interface ReplyEngine {
  generate(prompt: Prompt, options: GenerateOptions): AsyncGenerator<Token, void>;
  measure(messages: Message[], options: PromptOptions): Promise<Measure>;
}

export class Chat {
  /** Messages of the conversation. They may be changed between two turns, for example to restore a saved conversation. */
  readonly messages: Message[] = [];
  private readonly options: GenerateOptions;
  private nReplies = 0;
  private isReplying = false;

  constructor(
    private readonly engine: ReplyEngine,
    { system, ...options }: GenerateOptions & { system?: string },
  ) {
    if (system !== undefined) this.messages.push({ role: "system", content: system });
    this.options = options;
  }

  /**
   * Add a user message and stream the reply. A reply that is cut short is kept up to there. The oldest turns are dropped from
   * `messages` when the context is full.
   *
   * @param options override the conversation's options. Default seed: the conversation's plus the number of earlier replies.
   * @throws WhetError another reply is in progress; the message is longer than the context.
   */
  async *send(content: string, options: GenerateOptions = {}): AsyncGenerator<Token, void> {
    if (typeof content !== "string") throw new WhetError(`Chat.send: content is ${show(content)}, expected a string.`);
    if (this.isReplying) throw new WhetError("Chat.send: another reply of this chat is in progress. Finish reading it, or leave its loop.");
    this.isReplying = true;
    try {
      yield* this.reply({ role: "user", content }, options);
    } finally {
      this.isReplying = false;
    }
  }

  private async *reply(message: Message, options: GenerateOptions): AsyncGenerator<Token, void> {
    const all = { ...this.options, ...options, n: 1, seed: options.seed ?? addToSeed(this.options.seed, this.nReplies) };
    this.engine.generate([message], all); // validates the settings; nothing runs until the first next()
    const { prompt, room } = await this.fitToContext([...this.messages, message], all);
    ++this.nReplies;
    let text = "";
    let hasStarted = false;
    try {
      for await (const token of this.engine.generate(prompt, { ...all, maxNewTokens: Math.min(maxNewTokensOf(all), room) })) {
        if (!hasStarted) this.messages.splice(0, this.messages.length, ...prompt);
        hasStarted = true;
        text += token.text;
        yield token;
      }
    } finally {
      if (hasStarted) this.messages.push({ role: "assistant", content: text });
    }
  }

  /** Drop the oldest turns until a reply fits. Return the remaining messages and the tokens left for the reply. */
  private async fitToContext(messages: Message[], options: GenerateOptions): Promise<{ prompt: Message[]; room: number }> {
    const { tools, addGenerationPrompt, templateOptions, minNewTokens = 0 } = options;
    for (let prompt = messages, share = 1; ; share = SHARE_AFTER_DROP) {
      const { tokens, context } = await this.engine.measure(prompt, { tools, addGenerationPrompt, templateOptions });
      const nReply = Math.max(1, minNewTokens, Math.min(maxNewTokensOf(options), Math.floor(context / REPLY_DIVISOR)));
      const maxPrompt = context - nReply;
      const fewer = dropOldestTurn(prompt);
      if (tokens <= maxPrompt * share || (fewer === undefined && tokens <= maxPrompt)) return { prompt, room: context - tokens };
      if (fewer === undefined) {
        throw new WhetError(
          `Chat.send: content takes ${tokens} tokens with the chat template and the system message, expected at most ${maxPrompt}: a context of ${context} minus ${nReply} for the reply. Shorten it, or load the model with a larger contextLength.`,
        );
      }
      prompt = fewer;
    }
  }
}

const maxNewTokensOf = ({ maxNewTokens = DEFAULTS.maxNewTokens }: GenerateOptions) => maxNewTokens;

/** Return the messages without the oldest turn, which begins with a user message, or undefined if only one turn is left. */
function dropOldestTurn(messages: Message[]): Message[] | undefined {
  const nOpening = messages[0].role === "system" ? 1 : 0;
  const next = messages.findIndex(({ role }, i) => i > nOpening && role === "user");
  return next < 0 ? undefined : [...messages.slice(0, nOpening), ...messages.slice(next)];
}
