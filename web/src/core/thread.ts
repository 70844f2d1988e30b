/** Thread of the engine's pool: never returns from the core, and ends by termination. */
import type { Exports, Thread } from "./core.js";
import { openParentPort } from "./port.js";

openParentPort().onMessage(({ port }: { port: MessagePort }) => {
  const fail = (error: unknown) => setTimeout(() => { throw error; }); // an error of the worker, unlike a rejection
  port.onmessage = ({ data }) => void run(data, port).catch(fail);
});

/** Run the core's tasks on its memory. The thread that waits for a failed task reports its exception. */
async function run({ module, memory, stack, tls }: Thread, port: MessagePort): Promise<never> {
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
