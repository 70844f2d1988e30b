/** Workers and their messages, the same in browsers, Deno, Bun and Node. */
export interface Port {
  postMessage(message: unknown): void;
  onMessage(listener: (message: any) => void): void;
}

export interface WorkerPort extends Port {
  onError(listener: (error: Error) => void): void;
  terminate(): void;
}

/** Undefined in a page. As a bare name, bundlers would put a stand-in there. */
const node = globalThis.process as NodeJS.Process | undefined;

export const isNode = Boolean(node?.versions?.node) && !("Bun" in globalThis) && !("Deno" in globalThis);

/** A module of Node's, which Deno and Bun have too; an import of it would stop bundlers. */
export const nodeModule = ((id: string) => node!.getBuiltinModule(id)) as NodeJS.Process["getBuiltinModule"];

/** A text is a URL, relative to the page where there is one. In Node other texts are paths, whatever characters they have. */
export function urlOf(source: string | URL): URL {
  const page = globalThis.location?.href;
  if (source instanceof URL || page !== undefined || /^(https?|file|blob|data):/i.test(source)) return new URL(source, page);
  return nodeModule("node:url").pathToFileURL(source);
}

/** Processors that this process may use. (Node has a navigator from 21 on.) */
export const nProcessors = () => (isNode ? nodeModule("node:os").availableParallelism() : navigator.hardwareConcurrency);

function ofWebWorker(worker: Worker): WorkerPort {
  return {
    postMessage: (message) => worker.postMessage(message),
    onMessage: (listener) => worker.addEventListener("message", (event) => listener(event.data)),
    onError: (listener) => worker.addEventListener("error", (event) => listener(new Error(event.message || "its script could not be loaded; serve the package's worker.js, thread.js, hf.js and wasm files from the page's own origin"))),
    terminate: () => worker.terminate(),
  };
}

function ofNodeWorker(url: URL): WorkerPort {
  const { Worker } = nodeModule("node:worker_threads");
  const worker = new Worker(url);
  worker.unref();
  let pending = 0; // the process lives while an answer is awaited
  return {
    postMessage: (message) => {
      if (++pending === 1) worker.ref();
      worker.postMessage(message);
    },
    onMessage: (listener) =>
      worker.on("message", (message) => {
        if (!("event" in message) && --pending <= 0) worker.unref();
        listener(message);
      }),
    onError: (listener) => {
      worker.on("error", (error) => listener(error as Error));
      worker.on("exit", (code) => listener(new Error(`it ended with code ${code}`)));
    },
    terminate: () => void worker.terminate(),
  };
}

/** A file of the package in the folder where it is served. */
export const assetUrl = (assets: string | URL, name: string) => new URL(name, `${urlOf(assets).href.replace(/\/$/, "")}/`);

/** The engine's worker; `assets`: where the package's files are served, if not beside this one. */
export async function startEngineWorker(assets: string | URL | undefined): Promise<WorkerPort> {
  const given = assets === undefined ? undefined : assetUrl(assets, "worker.js");
  if (isNode) return ofNodeWorker(given ?? new URL("./worker.js", import.meta.url));
  const name = `whet-web-${crypto.randomUUID()}`;
  // Bundlers look for the whole expression.
  const worker = given === undefined ? new Worker(new URL("./worker.js", import.meta.url), { type: "module", name }) : new Worker(given, { type: "module", name });
  return watched(ofWebWorker(worker), name);
}

export async function startThreadWorker(): Promise<WorkerPort> {
  if (isNode) return ofNodeWorker(new URL("./thread.js", import.meta.url));
  return ofWebWorker(new Worker(new URL("./thread.js", import.meta.url), { type: "module" }));
}

/** A browser says nothing when it ends a worker. The worker holds a lock, which is free once it is gone. */
function watched(port: WorkerPort, name: string): WorkerPort {
  if (navigator.locks === undefined) return port;
  const listeners: ((error: Error) => void)[] = [];
  const left = new AbortController();
  let isWatched = false;
  port.onMessage(() => {
    if (isWatched) return; // a first answer: the lock is held
    isWatched = true;
    navigator.locks
      .request(name, { signal: left.signal }, () => {
        for (const listener of listeners) listener(new Error("it was ended from outside"));
      })
      .catch(() => {}); // this side has ended it
  });
  return {
    ...port,
    onError(listener) {
      listeners.push(listener);
      port.onError(listener);
    },
    terminate() {
      left.abort();
      port.terminate();
    },
  };
}

/** In a worker: the way to whoever started it. */
export function parent(): Port {
  if (isNode) {
    const { parentPort } = nodeModule("node:worker_threads");
    return { postMessage: (message) => parentPort!.postMessage(message), onMessage: (listener) => void parentPort!.on("message", listener) };
  }
  // Until the worker ends; see watched().
  if (navigator.locks !== undefined && self.name !== "") void navigator.locks.request(self.name, () => new Promise(() => {}));
  return { postMessage: (message) => postMessage(message), onMessage: (listener) => addEventListener("message", (event) => listener(event.data)) };
}

/** The script of what Hugging Face's libraries save; a bundler takes it as a file that is copied, and leaves its import as it stands (build.mjs). */
export const loadHf = (): Promise<typeof import("./hf.js")> => import(new URL("./hf.js", import.meta.url).href);

/** Lets messages come in. (Timers of zero would wait for 4 ms.) */
export function breathe(): Promise<void> {
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
