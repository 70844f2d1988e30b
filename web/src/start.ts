/** The module's file that this engine of WebAssembly takes. */
import { Core } from "./core.js";
import { WhetError } from "./errors.js";
import { isNode, nodeModule } from "./port.js";

/**
 * The module that this engine of WebAssembly runs: relaxed SIMD and threads, or SIMD128 alone.
 *
 * @param where begins the errors.
 * @param assets where the package's files are served, if not beside this script.
 */
export async function startCore(isolated: boolean, where: string, assets?: string | URL): Promise<{ core: Core; build: "threads" | "plain" }> {
  // Bundlers look for these two expressions as they stand.
  const beside = { threads: new URL("./threads.wasm", import.meta.url), plain: new URL("./plain.wasm", import.meta.url) };
  for (const build of ["threads", "plain"] as const) {
    if (build === "threads" && (!isolated || (isNode && process.env.WHET_WEB_BUILD === "plain"))) continue;
    const url = assets === undefined ? beside[build] : new URL(`${build}.wasm`, new URL(assets, globalThis.location?.href));
    const bytes = await fetchBytes(url, where);
    if (!WebAssembly.validate(bytes)) continue;
    return { core: await Core.create(await WebAssembly.compile(bytes), build === "threads"), build };
  }
  throw new WhetError(`${where}: this WebAssembly engine has no SIMD, which the core needs. Use Chrome 91, Firefox 89, Safari 16.4, Node 22 or later.`);
}

async function fetchBytes(url: URL, where: string): Promise<Uint8Array<ArrayBuffer>> {
  if (url.protocol === "file:") return new Uint8Array(await nodeModule("node:fs/promises").readFile(url));
  const response = await fetch(url);
  if (!response.ok) throw new WhetError(`${where}: ${url.href} answered ${response.status}. Serve the package's wasm files beside its scripts.`);
  return new Uint8Array(await response.arrayBuffer());
}
