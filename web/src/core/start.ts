/** Selection and start of the WebAssembly build that this runtime supports. */
import { Core } from "./core.js";
import { WhetError } from "./errors.js";
import { assetUrl, isNode, nodeModule } from "./port.js";

/** "threads": relaxed SIMD and shared memory; "threads-plain": SIMD128 and shared memory; "plain": only SIMD128; "learner":
 * "threads" with the learner; "gpu": "plain" with the plans of a GPU. */
export type Build = "threads" | "threads-plain" | "plain" | "learner" | "gpu";

/** Headers that isolate a page. */
export const ISOLATION = "Cross-Origin-Opener-Policy: same-origin and Cross-Origin-Embedder-Policy: require-corp";

/**
 * Start the best build that this runtime supports: relaxed SIMD and threads, SIMD128 and threads, or only SIMD128; or another.
 *
 * @param where prefix of error messages.
 * @param options.assets URL of the folder with the package's files. Default: this script's folder.
 * @param options.learning start the build that learns, and no other.
 * @param options.gpu start the build for GPUs, and no other, with the functions that it calls.
 */
export async function startCore(isolated: boolean, where: string, { assets, learning = false, gpu }: { assets?: string | URL; learning?: boolean; gpu?: WebAssembly.ModuleImports } = {}): Promise<{ core: Core; build: Build }> {
  if (learning && !isolated) throw new WhetError(`${where}: learning needs threads, and this page is not cross-origin isolated. Serve it with the headers ${ISOLATION}, or omit learning.`);
  // Bundlers match these exact expressions.
  const urls: Record<Build, URL> = {
    threads: new URL("./threads.wasm", import.meta.url),
    "threads-plain": new URL("./threads-plain.wasm", import.meta.url),
    plain: new URL("./plain.wasm", import.meta.url),
    learner: new URL("./learner.wasm", import.meta.url),
    gpu: new URL("./gpu.wasm", import.meta.url),
  };
  const only = isNode ? globalThis.process.env.WHET_WEB_BUILD : undefined;
  const others: Build[] | undefined = gpu !== undefined ? ["gpu"] : learning ? ["learner"] : undefined;
  for (const build of others ?? (["threads", "threads-plain", "plain"] as const)) {
    const isShared = build !== "plain" && build !== "gpu";
    if ((isShared && !isolated) || (only !== undefined && only !== build && others === undefined)) continue;
    const url = assets === undefined ? urls[build] : assetUrl(assets, `${build}.wasm`);
    const bytes = await fetchBytes(url, where);
    if (!WebAssembly.validate(bytes)) continue;
    const module = await WebAssembly.compile(bytes);
    const core = await Core.create(module, isShared, gpu).catch((error) => {
      if (!isShared) throw error; // else: no shared memory, or no address space for it
    });
    if (core !== undefined) return { core, build };
  }
  if (learning) throw new WhetError(`${where}: learning needs relaxed SIMD and shared memory, which this runtime lacks. Use Chrome 114, Firefox 145, Node 22 or later, or omit learning.`);
  throw new WhetError(`${where}: this runtime's WebAssembly has no SIMD, which the core needs. Use Chrome 91, Firefox 89, Safari 16.4, Node 22 or later.`);
}

async function fetchBytes(url: URL, where: string): Promise<Uint8Array<ArrayBuffer>> {
  if (url.protocol === "file:") return new Uint8Array(await nodeModule("node:fs/promises").readFile(url));
  const response = await fetch(url).catch((error: Error) => {
    throw new WhetError(`${where}: ${url.href} could not be fetched (${error.message}). Serve the package's wasm files next to its scripts, and allow them in the content security policy: connect-src.`);
  });
  if (!response.ok) throw new WhetError(`${where}: ${url.href} answered ${response.status}. Serve the package's wasm files next to its scripts.`);
  return new Uint8Array(await response.arrayBuffer());
}
