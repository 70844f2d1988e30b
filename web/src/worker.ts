/** The worker of an Engine: its calls, one Host, and the signals of those that run. */
import { Host } from "./host.js";
import { parent } from "./port.js";
import type { Answer, Call, Message } from "./protocol.js";

const port = await parent();
const running = new Map<number, AbortController>();
let host: Host | undefined;

async function answer(id: number, call: Call, signal: AbortSignal): Promise<unknown> {
  const emit = (event: unknown) => port.postMessage({ id, event } satisfies Answer);
  if (call.method === "load") {
    host = await Host.load(call.source, call.options, call.isolated, emit, signal);
    return host.info();
  }
  const engine = host!; // an Engine exists once it is loaded
  switch (call.method) {
    case "generate":
      return engine.generate(call.prompt, call.sampling, signal, emit);
    case "logprobs":
      return engine.logprobs(call.tokens, call.scoreFrom, call.temperature, call.adapter, signal);
    case "loadAdapter":
      return engine.loadAdapter(call.parts);
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
