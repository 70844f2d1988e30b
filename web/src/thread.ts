/** A thread of the engine's pool: it never returns from the core, and ends when it is terminated. */
import type { Exports, Thread } from "./core.js";
import { parent } from "./port.js";

const port = parent();
port.onMessage((thread: Thread) => void run(thread));

/** Runs the core's tasks on its memory. What a task throws is told by the thread that waits for it. */
async function run({ module, memory, stack, tls }: Thread): Promise<never> {
  const raise = () => {
    throw new Error();
  };
  const core = (await WebAssembly.instantiate(module, { env: { memory }, host: { raise } })).exports as unknown as Exports;
  core.__stack_pointer.value = stack;
  core.__wasm_init_tls(tls);
  port.postMessage({ ready: true });
  for (;;) {
    try {
      core.work();
    } catch {
      core.__stack_pointer.value = stack;
      core.fail_task();
    }
  }
}
