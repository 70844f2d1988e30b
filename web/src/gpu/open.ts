/** The GPU of this runtime. */
import { isNode, nodeModule } from "../core/port.js";

export interface Gpu {
  device: GPUDevice;
  /** Its vendor, architecture and description, as far as the runtime reports them. */
  name: string;
}

/** Limits that are raised to the GPU's: the largest buffer, and the largest part of it that a kernel reads. */
const RAISED = ["maxBufferSize", "maxStorageBufferBindingSize"] as const;

/** Open the GPU, or return why there is none. */
export async function openGpu(): Promise<Gpu | string> {
  const gpu = await findWebGpu();
  if (typeof gpu === "string") return gpu;
  try {
    const adapter = await gpu.requestAdapter({ powerPreference: "high-performance" });
    if (adapter === null) return "WebGPU has no adapter: the browser does not support this GPU or its driver";
    const device = await adapter.requestDevice({ requiredLimits: Object.fromEntries(RAISED.map((name) => [name, adapter.limits[name]])) });
    const { vendor, architecture, description } = adapter.info;
    return { device, name: [vendor, architecture, description].filter((part) => part !== "").join(" ") };
  } catch (error) {
    return `WebGPU failed: ${(error as Error).message}`;
  }
}

let created: GPU | undefined; // Node's: devices do not outlive it

/** Return WebGPU: of the browser or Deno, or in Node of the package webgpu. */
async function findWebGpu(): Promise<GPU | string> {
  const own = globalThis.navigator?.gpu;
  if (own !== undefined) return own;
  if (!isNode) return globalThis.isSecureContext === false ? "WebGPU needs a secure context: serve the page by HTTPS" : "this runtime has no WebGPU";
  try {
    const { createRequire } = nodeModule("node:module");
    const at = createRequire(import.meta.url).resolve("webgpu");
    const { create, globals } = await import(nodeModule("node:url").pathToFileURL(at).href);
    Object.assign(globalThis, globals);
    return (created ??= create([]) as GPU);
  } catch (error) {
    return `Node has WebGPU only with the package webgpu, which could not be loaded (${(error as Error).message.split("\n")[0]})`;
  }
}
