/** Instance of the core's WebAssembly module: memory, exports, and C++ exceptions as errors. */
import { OutOfMemoryError, WhetError } from "./errors.js";

const PAGE = 65536;
const LARGEST_PAGES = 65536;
const STEP_PAGES = 4096; // 256 MB

/** C++ exception: its mangled type and its text. */
export class CoreError extends WhetError {
  constructor(
    readonly type: string,
    text: string,
  ) {
    super(text);
  }
}

export type Exports = Record<string, (...args: number[]) => number> & {
  __stack_pointer: WebAssembly.Global<"i32">;
  __tls_size?: WebAssembly.Global<"i32">;
};

/** State with which a worker runs the core's tasks on the same memory. */
export interface Thread {
  module: WebAssembly.Module;
  memory: WebAssembly.Memory;
  stack: number;
  tls: number;
}

/** Allocate as large a memory as the system allows: shared memory reserves its maximum as address space, of which iOS and
 * 32-bit systems may have less than 4 GiB. */
function allocateMemory(shared: boolean): [WebAssembly.Memory, number] {
  for (let maximum = LARGEST_PAGES; ; maximum -= STEP_PAGES) {
    try {
      return [new WebAssembly.Memory({ initial: 64, maximum, shared }), maximum * PAGE];
    } catch (error) {
      if (maximum <= STEP_PAGES) throw error;
    }
  }
}

export class Core {
  private constructor(
    readonly module: WebAssembly.Module,
    readonly memory: WebAssembly.Memory,
    /** Maximum size of the memory. */
    readonly maxBytes: number,
    private readonly exports: Exports,
  ) {}

  /** Instantiate the module. `shared`: on memory that threads share, for which the module must be built. `gpu`: the functions that
   * the build for GPUs calls. */
  static async create(module: WebAssembly.Module, shared: boolean, gpu: WebAssembly.ModuleImports = {}): Promise<Core> {
    const [memory, maxBytes] = allocateMemory(shared);
    const text = (at: number, n: number) => new TextDecoder().decode(new Uint8Array(memory.buffer, at, n).slice());
    const raise = (type: number, typeSize: number, at: number, size: number) => {
      throw new CoreError(text(type, typeSize), text(at, size));
    };
    const instance = await WebAssembly.instantiate(module, { env: { memory }, host: { raise }, gpu });
    const core = new Core(module, memory, maxBytes, instance.exports as unknown as Exports);
    core.call("__wasm_call_ctors"); // once for all threads: constructed objects are in shared memory
    return core;
  }

  /** Call an export. The stack pointer is restored if it throws. */
  call(name: string, ...args: number[]): number {
    const stack = this.exports.__stack_pointer.value;
    try {
      return this.exports[name](...args);
    } catch (error) {
      this.exports.__stack_pointer.value = stack;
      if (error instanceof CoreError && /bad_alloc|length_error/.test(error.type)) {
        throw new OutOfMemoryError(
          `The engine is out of memory at ${Math.round(this.memory.buffer.byteLength / 1e6)} MB. Load a smaller model, or pass a smaller contextLength.`,
        );
      }
      throw error;
    }
  }

  allocate(bytes: number): number {
    return this.call("allocate", bytes) >>> 0;
  }

  release(at: number): void {
    this.call("release", at);
  }

  bytes(at: number, n: number): Uint8Array<ArrayBufferLike> {
    return new Uint8Array(this.memory.buffer, at >>> 0, n);
  }

  /** Copy typed arrays into the core's memory, call `use` with their addresses, and free the copies. */
  with<T>(arrays: ArrayBufferView[], use: (...at: number[]) => T): T {
    const addresses: number[] = [];
    try {
      for (const array of arrays) {
        addresses.push(this.allocate(Math.max(1, array.byteLength)));
        const from = new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
        this.bytes(addresses[addresses.length - 1], array.byteLength).set(from);
      }
      return use(...addresses);
    } finally {
      for (const at of addresses) this.release(at);
    }
  }

  withText<T>(text: string, use: (at: number, n: number) => T): T {
    const bytes = new TextEncoder().encode(text);
    return this.with([bytes], (at) => use(at, bytes.length));
  }

  /** Return numbers in place, valid until the memory grows. */
  view(at: number, n: number): Float32Array {
    return new Float32Array(this.memory.buffer, at >>> 0, n);
  }

  floats(at: number, n: number): Float32Array<ArrayBuffer> {
    return this.view(at, n).slice() as Float32Array<ArrayBuffer>;
  }

  integers(at: number, n: number): Int32Array<ArrayBuffer> {
    return new Int32Array(this.memory.buffer, at >>> 0, n).slice() as Int32Array<ArrayBuffer>;
  }

  /** Read a struct of 32-bit fields. */
  struct<K extends string>(names: readonly K[], at: number): Record<K, number> {
    const values = this.integers(at, names.length);
    return Object.fromEntries(names.map((name, i) => [name, values[i]])) as Record<K, number>;
  }

  /** Read named doubles. */
  doubles<K extends string>(names: readonly K[], at: number): Record<K, number> {
    const values = new Float64Array(this.memory.buffer, at >>> 0, names.length);
    return Object.fromEntries(names.map((name, i) => [name, values[i]])) as Record<K, number>;
  }

  /** Return the text that the last call left in the core's result buffer. */
  result(): string {
    const at = this.call("result_data");
    return new TextDecoder().decode(this.bytes(at, this.call("result_size")).slice());
  }

  json<T>(name: string, ...args: number[]): T {
    this.call(name, ...args);
    return JSON.parse(this.result()) as T;
  }

  /** Size of the module's memory, which never shrinks. */
  get memoryBytes(): number {
    return this.memory.buffer.byteLength;
  }

  // ------------------------------------------------------------- threads

  /** Allocate a stack and thread-local memory for another instance on this memory. */
  newThread(): Thread {
    const stackBytes = 4 * PAGE;
    const stack = this.allocate(stackBytes) + stackBytes;
    const tls = this.allocate(Math.max(16, this.exports.__tls_size?.value ?? 0));
    return { module: this.module, memory: this.memory, stack: stack - (stack % 16), tls };
  }
}
