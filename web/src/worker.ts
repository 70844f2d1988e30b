/** The worker of an Engine: its calls, one Host, and the signals of those that run. */
import type { DownloadOptions } from "./download.js";
import { estimate, Host } from "./host.js";
import { parent } from "./port.js";
import type { Answer, Call, FileOptions, Message } from "./protocol.js";

const port = parent();
const running = new Map<number, AbortController>();
let host: Host | undefined;

async function answer(id: number, call: Call, signal: AbortSignal): Promise<unknown> {
  const emit = (event: Extract<Answer, { event: unknown }>["event"]) => port.postMessage({ id, event } satisfies Answer);
  const from = (where: string, { sha256, cache }: FileOptions = {}): DownloadOptions => ({ where, signal, onProgress: emit, sha256, cache });
  if (call.method === "load") {
    host = await Host.load(call.files, call.options, call.isolated, from("Engine.load", call.options));
    return host.info();
  }
  if (call.method === "estimate") return estimate(call.files, call.options, from("Engine.estimate"));
  const engine = host!; // an Engine exists once it is loaded
  switch (call.method) {
    case "generate":
      return engine.generate(call.request, signal, emit);
    case "measure":
      return engine.measure(call.messages, call.options);
    case "logprobs":
      return engine.logprobs(call, signal);
    case "tokenize":
      return engine.tokenize(call.text, call.addSpecialTokens);
    case "detokenize":
      return engine.detokenize(call.tokens);
    case "render":
      return engine.render(call.messages, call.options);
    case "loadAdapter":
      return engine.loadAdapter(call.files, from("Engine.loadAdapter", call.options));
    case "removeAdapter":
      return engine.removeAdapter(call.adapter);
    case "info":
      return engine.info();
  }
}

port.onMessage((message: Message) => {
  if ("abort" in message) {
    running.get(message.id)?.abort();
    return;
  }
  const { id, call } = message;
  const controller = new AbortController();
  running.set(id, controller);
  answer(id, call, controller.signal)
    .then(
      (result) => port.postMessage({ id, result } satisfies Answer),
      (error) => port.postMessage({ id, error: { name: String(error?.name), message: String(error?.message ?? error) } } satisfies Answer),
    )
    .finally(() => running.delete(id));
});
