/** Workers and messages for browsers, Deno, Bun and Node. */
export interface Port {
  postMessage(message: object, transfer?: MessagePort[]): void;
  onMessage(listener: (message: any) => void): void;
}

export interface WorkerPort extends Port {
  onError(listener: (error: Error) => void): void;
  terminate(): void;
}

/** Undefined in a page. (Bundlers would replace a bare `process` with a polyfill.) */
const node = globalThis.process as NodeJS.Process | undefined;

/** Deno's web workers keep the process alive if they are terminated while they run; its workers of Node do not. */
const hasNodeWorkers = Boolean(node?.versions?.node) && !("Bun" in globalThis);

export const isNode = hasNodeWorkers && !("Deno" in globalThis);

/** Return a built-in module of Node, Deno or Bun. Bundlers would fail on an import. */
export const nodeModule = ((id: string) => node!.getBuiltinModule(id)) as NodeJS.Process["getBuiltinModule"];

/** Resolve a string to a URL, relative to the page if there is one. In Node, other strings are paths, whatever their characters. */
export function urlOf(source: string | URL): URL {
  const page = globalThis.location?.href;
  if (source instanceof URL || page !== undefined || /^(https?|file|blob|data):/i.test(source)) return new URL(source, page);
  return nodeModule("node:url").pathToFileURL(source);
}

/** Return the number of processors available to this process. (Node has a navigator since 21.) */
export const nProcessors = () => (isNode ? nodeModule("node:os").availableParallelism() : navigator.hardwareConcurrency);

function wrapWebWorker(worker: Worker): WorkerPort {
  return {
    postMessage: (message, transfer = []) => worker.postMessage(message, transfer),
    onMessage: (listener) => worker.addEventListener("message", (event) => listener(event.data)),
    onError: (listener) => worker.addEventListener("error", (event) => listener(new Error(event.message || "its script could not be loaded; serve the package's worker.js, thread.js, hf.js, learner.js, gpu.js and wasm files from the page's own origin"))),
    terminate: () => worker.terminate(),
  };
}

function wrapNodeWorker(url: URL): WorkerPort {
  const { Worker } = nodeModule("node:worker_threads");
  const worker = new Worker(url);
  worker.unref();
  let pending = 0; // calls in progress keep the process alive
  return {
    postMessage: (message, transfer = []) => {
      if ("call" in message && ++pending === 1) worker.ref();
      worker.postMessage(message, transfer as never[]);
    },
    onMessage: (listener) =>
      worker.on("message", (message) => {
        if (!("event" in message) && --pending <= 0) worker.unref();
        listener(message);
      }),
    onError: (listener) => {
      worker.on("error", (error) => listener(error as Error));
      worker.on("exit", (code) => listener(new Error(`it exited with code ${code}`)));
    },
    terminate: () => void worker.terminate(),
  };
}

/** Return the URL of a package file in the folder that serves it. */
export const assetUrl = (assets: string | URL, name: string) => new URL(name, `${urlOf(assets).href.replace(/\/$/, "")}/`);

/** Start the engine's worker. `assets`: URL of the folder with the package's files. Default: this script's folder. */
export async function startEngineWorker(assets: string | URL | undefined): Promise<WorkerPort> {
  const given = assets === undefined ? undefined : assetUrl(assets, "worker.js");
  if (hasNodeWorkers) return wrapNodeWorker(given ?? new URL("./worker.js", import.meta.url));
  const name = `whet-web-${crypto.randomUUID()}`;
  // Bundlers match the whole expression.
  const worker = given === undefined ? new Worker(new URL("./worker.js", import.meta.url), { type: "module", name }) : new Worker(given, { type: "module", name });
  return watchWorker(wrapWebWorker(worker), name);
}

/** Start a worker for a thread; `assets` as above. */
export function startThreadWorker(assets: string | URL | undefined): WorkerPort {
  const given = assets === undefined ? undefined : assetUrl(assets, "thread.js");
  if (hasNodeWorkers) return wrapNodeWorker(given ?? new URL("./thread.js", import.meta.url));
  return wrapWebWorker(given === undefined ? new Worker(new URL("./thread.js", import.meta.url), { type: "module" }) : new Worker(given, { type: "module" }));
}

/** Report a worker that the browser has terminated, which raises no event: the worker holds a lock, which its end releases. */
function watchWorker(port: WorkerPort, name: string): WorkerPort {
  if (navigator.locks === undefined) return port;
  const listeners: ((error: Error) => void)[] = [];
  const ended = new AbortController();
  let isWatched = false;
  port.onMessage(() => {
    if (isWatched) return; // the first message: the worker holds the lock
    isWatched = true;
    navigator.locks
      .request(name, { signal: ended.signal }, () => {
        for (const listener of listeners) listener(new Error("it was terminated from outside"));
      })
      .catch(() => {}); // terminated by this side
  });
  return {
    ...port,
    onError(listener) {
      listeners.push(listener);
      port.onError(listener);
    },
    terminate() {
      ended.abort();
      port.terminate();
    },
  };
}

/** Return a worker's port to its parent. */
export function openParentPort(): Port {
  if (hasNodeWorkers) {
    const { parentPort } = nodeModule("node:worker_threads");
    return { postMessage: (message, transfer = []) => parentPort!.postMessage(message, transfer as never[]), onMessage: (listener) => void parentPort!.on("message", listener) };
  }
  // Held until the worker ends; see watchWorker().
  if (navigator.locks !== undefined && self.name !== "") void navigator.locks.request(self.name, () => new Promise(() => {}));
  return { postMessage: (message, transfer) => postMessage(message, { transfer }), onMessage: (listener) => addEventListener("message", (event) => listener(event.data)) };
}

/** Yield to the event loop, so that messages are handled. (Zero timers are clamped to 4 ms.) */
export function yieldToEventLoop(): Promise<void> {
  if (isNode) return new Promise((resolve) => setImmediate(resolve));
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}
