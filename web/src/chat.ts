/** A conversation: the messages so far, and the engine that answers. The engine keeps what it has computed of them. */
import type { Engine, GenerateOptions } from "./engine.js";
import { WhetError } from "./errors.js";
import type { Token } from "./protocol.js";
import { show } from "./sampling.js";
import type { Message } from "./tokenizer.js";

export class Chat {
  readonly messages: Message[] = [];
  private readonly options: GenerateOptions;

  constructor(
    private readonly engine: Engine,
    { system, ...options }: GenerateOptions & { system?: string },
  ) {
    if (system !== undefined) this.messages.push({ role: "system", content: system });
    this.options = options;
  }

  /**
   * Adds a message of the user and streams the assistant's, which is kept as far as it came. `options` go before the
   * conversation's.
   */
  async *send(content: string, options: GenerateOptions = {}): AsyncGenerator<Token, void> {
    if (typeof content !== "string") throw new WhetError(`Chat.send: content is ${show(content)}, expected a string.`);
    const asked = [...this.messages, { role: "user", content }];
    const tokens = this.engine.generate(asked, { ...this.options, ...options, n: 1 });
    let text = "";
    let hasBegun = false;
    try {
      for await (const token of tokens) {
        if (!hasBegun) this.messages.push(asked[asked.length - 1]);
        hasBegun = true;
        text += token.text;
        yield token;
      }
    } finally {
      if (hasBegun) this.messages.push({ role: "assistant", content: text });
    }
  }
}
