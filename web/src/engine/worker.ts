/** Engine worker: dispatches calls to its Host and keeps the abort signals of calls in progress. */
import { openParentPort } from "../core/port.js";
import type { DownloadOptions, FileOptions } from "../files/reader.js";
import { Host } from "./host.js";
import { estimate } from "./plan.js";
import type { Call, Reply, WorkerMessage } from "./protocol.js";

const port = openParentPort();
const running = new Map<number, AbortController>();
let host: Host | undefined;

async function dispatch(id: number, call: Call, signal: AbortSignal): Promise<unknown> {
  const emit = (event: Extract<Reply, { event: unknown }>["event"]) => port.postMessage({ id, event } satisfies Reply);
  const from = (where: string, { sha256, cache }: FileOptions = {}): DownloadOptions => ({ where, signal, onProgress: emit, sha256, cache });
  if (call.method === "load") {
    const startWorker = (thread: MessagePort) => port.postMessage({ id, event: { port: thread } } satisfies Reply, [thread]);
    host = await Host.load(call.files, call.options, call.isolated, from("Engine.load", call.options), startWorker);
    return host.info();
  }
  if (call.method === "estimate") return estimate(call.files, call.options, from("Engine.estimate"));
  const engine = host!; // other calls follow a load
  switch (call.method) {
    case "generate": return engine.generate(call.request, signal, emit);
    case "measure": return engine.measure(call.messages, call.options);
    case "logprobs": return engine.logprobs(call, signal);
    case "tokenize": return engine.getTokenizer("Engine.tokenize").encode(call.text, call.addSpecialTokens);
    case "detokenize": return engine.getTokenizer("Engine.detokenize").decode(call.tokens);
    case "render": return engine.getTokenizer("Engine.render").render(call.messages, call.options, "Engine.render");
    case "loadAdapter": return engine.loadAdapter(call.files, from("Engine.loadAdapter", call.options));
    case "removeAdapter": return engine.removeAdapter(call.adapter);
    case "learn": return engine.learn(call.request, from(call.request.where));
    case "info": return engine.info();
  }
}

port.onMessage((message: WorkerMessage) => {
  if ("abort" in message) {
    running.get(message.id)?.abort();
    return;
  }
  const { id, call } = message;
  const controller = new AbortController();
  running.set(id, controller);
  dispatch(id, call, controller.signal)
    .then(
      (result) => port.postMessage({ id, result } satisfies Reply),
      (error) => port.postMessage({ id, error: { name: String(error?.name), message: String(error?.message ?? error) } } satisfies Reply),
    )
    .finally(() => running.delete(id));
});
