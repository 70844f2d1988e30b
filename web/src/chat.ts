/** A conversation: the messages so far, and the engine that answers. The engine keeps what it has computed of them.
 *
 * As whet.cli.conversation: every reply is drawn with its own seed, and the oldest turns are dropped when the context is full. */
import type { Engine, GenerateOptions } from "./engine.js";
import { WhetError } from "./errors.js";
import type { Token } from "./protocol.js";
import { addToSeed, DEFAULTS, show } from "./sampling.js";
import type { Message } from "./tokenizer.js";

const REPLY_SHARE = 4; // a quarter of the context is left for a reply, or maxNewTokens where that is less
// Of the prompt's part of the context. What follows a dropped turn has to be computed again, so that several turns are
// dropped at once, and the next messages find room.
const KEPT_WHEN_FULL = 0.75;

export class Chat {
  /** The conversation so far. It may be changed between two turns, such as to one that was stored. */
  readonly messages: Message[] = [];
  private readonly options: GenerateOptions;
  private nReplies = 0;
  private isAnswering = false;

  constructor(
    private readonly engine: Engine,
    { system, ...options }: GenerateOptions & { system?: string },
  ) {
    if (system !== undefined) this.messages.push({ role: "system", content: system });
    this.options = options;
  }

  /**
   * Adds a message of the user and streams the assistant's, which is kept as far as it came. The oldest turns are dropped
   * from `messages` when the context is full.
   *
   * @param options go before the conversation's. A reply's seed is the conversation's, plus the number of replies before,
   *   unless `seed` is among them.
   * @throws WhetError another reply is under way; the message is longer than the context.
   */
  async *send(content: string, options: GenerateOptions = {}): AsyncGenerator<Token, void> {
    if (typeof content !== "string") throw new WhetError(`Chat.send: content is ${show(content)}, expected a string.`);
    if (this.isAnswering) throw new WhetError("Chat.send: another reply of this chat is under way. Read it to its end, or leave its loop.");
    this.isAnswering = true;
    try {
      yield* this.answer({ role: "user", content }, options);
    } finally {
      this.isAnswering = false;
    }
  }

  private async *answer(message: Message, options: GenerateOptions): AsyncGenerator<Token, void> {
    const all = { ...this.options, ...options, n: 1, seed: options.seed ?? addToSeed(this.options.seed, this.nReplies) };
    this.engine.generate([message], all); // validates the settings; nothing runs before the first next()
    const { asked, room } = await this.fit([...this.messages, message], all);
    ++this.nReplies;
    let text = "";
    let hasBegun = false;
    try {
      for await (const token of this.engine.generate(asked, { ...all, maxNewTokens: Math.min(mostNewTokens(all), room) })) {
        if (!hasBegun) this.messages.splice(0, this.messages.length, ...asked);
        hasBegun = true;
        text += token.text;
        yield token;
      }
    } finally {
      if (hasBegun) this.messages.push({ role: "assistant", content: text });
    }
  }

  /** The newest messages that leave room for a reply, and that room in tokens. */
  private async fit(messages: Message[], options: GenerateOptions): Promise<{ asked: Message[]; room: number }> {
    const { tools, addGenerationPrompt, templateOptions, minNewTokens = 0 } = options;
    for (let asked = messages, share = 1; ; share = KEPT_WHEN_FULL) {
      const { tokens, context } = await this.engine.measure(asked, { tools, addGenerationPrompt, templateOptions });
      const least = Math.max(1, minNewTokens, Math.min(mostNewTokens(options), Math.floor(context / REPLY_SHARE)));
      const most = context - least;
      const fewer = withoutOldest(asked);
      if (tokens <= most * share || (fewer === undefined && tokens <= most)) return { asked, room: context - tokens };
      if (fewer === undefined) {
        throw new WhetError(
          `Chat.send: content takes ${tokens} tokens with what the chat template and the system message add, and of a context of ${context} a reply needs ${least}, which leaves ${most}. Shorten it, or load the model with a larger contextLength.`,
        );
      }
      asked = fewer;
    }
  }
}

const mostNewTokens = ({ maxNewTokens = DEFAULTS.maxNewTokens }: GenerateOptions) => maxNewTokens;

/** Messages without their oldest turn, which begins with a message of the user; undefined where there is one turn left. */
function withoutOldest(messages: Message[]): Message[] | undefined {
  const nOpening = messages[0].role === "system" ? 1 : 0;
  const next = messages.findIndex(({ role }, i) => i > nOpening && role === "user");
  return next < 0 ? undefined : [...messages.slice(0, nOpening), ...messages.slice(next)];
}
