/** Runs the core's plan of a model on a GPU: its weights, keys and values, and the commands of a step (cpp/gpu/plan.h). */
import type { Core, CoreError } from "../core/core.js";
import { OutOfMemoryError, WhetError } from "../core/errors.js";
import { gpuCalls, kernels } from "../facts.js";
import { type ModelConfig, slots } from "../models/architecture.js";
import { type Gpu, openGpu } from "./open.js";

/** Rows of a workgroup, workgroups per such rows, number of the pipeline, and numbers of its buffers. */
type Variant = [rows: number, groups: number, pipeline: number, buffers: number[]];
type PlannedDispatch = [variants: Variant[], count: number];
type Upload = [buffer: number, offset: number, address: number, bytes: number];

interface Made {
  buffers: [name: string, bytes: number, rows: number][];
  pipelines: [constants: string, files: (keyof typeof kernels)[]][];
}

const PASSES = ["write_pages", "forward", "head", "draw", "next_tokens"] as const;
type Pass = (typeof PASSES)[number];

/** A plan of the core's gpu_plan. */
export interface GpuPlan extends Made, Record<Pass, PlannedDispatch[]> {
  points: number[];
  kvBytes: number;
  nUsedExperts: number;
}

/** A plan of the core's gpu_adapter. */
interface AdapterPlan extends Made {
  uploads: Upload[];
  points: PlannedDispatch[][];
}

interface Pipeline {
  pipeline: GPUComputePipeline;
  layout: GPUBindGroupLayout;
}

interface Dispatch {
  /** Ascending by rows: the first with all rows is used, or the last. */
  variants: { rows: number; groups: number; pipeline?: GPUComputePipeline; group?: GPUBindGroup }[];
  /** The rows: an index of COUNTS. */
  count: number;
}

/** A pass over dispatches with its number of rows, and the adapters of the rows. */
interface Run {
  pass: Pass;
  n: number;
  adapters?: number[];
}

const COUNTS = ["tokens", "experts", "heads", "one"];
const SKIP = 0xffffffff; // in place of a pipeline: nothing to do
const INPUTS = ["tokens", "page_table", "runs", "rotation", "local_rotation", "embedded"];
const STEP_INPUTS = ["tokens", "page_table", "rotation", "local_rotation", "draws"];
const BINDING = /@binding\((\d+)\) var<storage, (read|read_write)>/g;

/** What ends a call of the core that needs a result of the GPU: step() calls it again with the result. */
class Suspended {}

/** Bytes of the largest buffer that a kernel can read. */
const bindingBytes = ({ device: { limits } }: Gpu) => Math.floor(Math.min(limits.maxBufferSize, limits.maxStorageBufferBindingSize, 0xffffffff) / 4) * 4;

/** Return the numbers of the adapters of a step's tokens. */
const adaptersOf = (tokens: Int32Array) => [...new Set(tokens.filter((_, i) => i % 4 === 3 && tokens[i] !== 0))].sort((a, b) => a - b);

/** Return what has no kernel on GPUs, if the core threw an error for this reason. */
function missingKernel(error: unknown): string {
  const { type, message } = error as CoreError;
  if (type?.includes("invalid_argument")) return message;
  throw error;
}

/** Sizes of the cache and of a step, from the plan of a model. */
interface Sizes {
  bf16Cache: number;
  kvBytes: number;
  maxRows: number;
}

/** Copies weights to a GPU as they are packed. */
export interface Uploads {
  /** Called before and after rows of a slot are packed, and after the last. */
  begin(slot: string): void;
  end(slot: string, rows: number): Promise<void>;
  finish(): Promise<void>;
}

interface Planned<P> {
  core: Core;
  build: "gpu";
  plan: P;
  program: Program;
}

/** Plan a model on the GPU, or return why it cannot run there. `start` starts the core's build for GPUs. */
export async function planOnGpu<P extends Sizes>(start: (calls: WebAssembly.ModuleImports) => Promise<Core>, planOn: (core: Core) => Promise<P>): Promise<Planned<P> | string> {
  const gpu = await openGpu();
  if (typeof gpu === "string") return gpu;
  const program = new Program(gpu);
  const core = await start(program.calls());
  const plan = await planOn(core);
  try {
    gpuCalls.gpu_plan(core, { ...plan, bindingBytes: bindingBytes(gpu) });
  } catch (error) {
    gpu.device.destroy();
    return `the GPU has no kernel for ${missingKernel(error)}`;
  }
  const gpuPlan = JSON.parse(core.result()) as GpuPlan;
  await program.build(core, gpuPlan);
  return { core, build: "gpu", plan: { ...plan, kvBytes: gpuPlan.kvBytes }, program };
}

export class Program {
  private core!: Core;
  private buffers: GPUBuffer[] = [];
  private readonly rows = new Map<string, number>();
  private readonly named = new Map<string, GPUBuffer>();
  private readonly pipelines = new Map<string, Promise<Pipeline>>();
  private passes!: Record<Pass, Dispatch[]>;
  private points = new Map<number, number>(); // points of adapters by the number of dispatches before
  private nUsedExperts = 0;
  private readonly adapters = new Map<number, { buffers: GPUBuffer[]; points: Dispatch[][] }>();
  private staging: GPUBuffer | undefined; // for results
  private awaited = 0; // bytes of the result that a suspended step waits for
  private failure: Error | undefined; // of the GPU: later steps throw it too

  /** Name of the GPU. */
  readonly name: string;

  constructor(private readonly gpu: Gpu) {
    this.name = gpu.name;
    const fail = (message: string) => (this.failure ??= new WhetError(`Engine: the GPU failed: ${message} Load the model again, or omit device.`));
    void gpu.device.lost.then(({ message, reason }) => fail(`it was lost (${message || reason}).`));
    gpu.device.addEventListener("uncapturederror", (event) => fail((event as GPUUncapturedErrorEvent).error.message));
  }

  /** The functions that the core calls. */
  calls(): Record<string, (...args: number[]) => void> {
    const arrays = (at: number, n: number) => {
      const [...pairs] = this.core.integers(at, 2 * n);
      return Array.from({ length: n }, (_, i) => this.core.integers(pairs[2 * i], pairs[2 * i + 1]));
    };
    return {
      write_pages: (at) => this.writePages(arrays(at, 1)[0]),
      forward: (at) => this.forward(arrays(at, INPUTS.length)),
      draw: (at) => this.runHeads(arrays(at, 3), ["head", "draw"], "drawn"),
      decode: (nSteps, at) => this.decode(nSteps, arrays(at, STEP_INPUTS.length)),
      logits: (at) => this.runHeads(arrays(at, 2), ["head"], "logits"),
      read_hidden: (at) => this.submit([], (encoder) => this.copyHidden(encoder, arrays(at, 1)[0])),
      remove_adapter: (number) => {
        for (const buffer of this.adapters.get(number)?.buffers ?? []) buffer.destroy();
        this.adapters.delete(number);
      },
      suspend: () => {
        throw new Suspended();
      },
    };
  }

  /** Make the buffers and pipelines of a plan. */
  async build(core: Core, plan: GpuPlan): Promise<void> {
    this.core = core;
    const ends = this.watch("Engine.load");
    this.buffers = plan.buffers.map(([name, bytes]) => this.makeBuffer(name, bytes));
    plan.buffers.forEach(([name, , rows], i) => {
      this.named.set(name, this.buffers[i]);
      this.rows.set(name, rows);
    });
    const pipelines = await this.compile(plan);
    this.passes = Object.fromEntries(PASSES.map((pass) => [pass, plan[pass].map((each) => this.makeDispatch(this.buffers, pipelines, each))])) as Record<Pass, Dispatch[]>;
    this.points = new Map(plan.points.map((after, i) => [after, i]));
    this.nUsedExperts = plan.nUsedExperts;
    await ends();
  }

  /** Copy weights as they are packed: a matrix is in the core's memory from the first of its rows to the last. */
  uploads(config: ModelConfig): Uploads {
    const matrices = new Map<string, { total: number; missing: number }>(); // rows
    for (const [slot, [total, width]] of slots(config)) if (width !== undefined) matrices.set(slot, { total, missing: total });
    const call = (name: string, slot: string) => this.core.withText(slot, (at, size) => this.core.call(name, at, size));
    return {
      begin: (slot) => {
        const rows = matrices.get(slot);
        if (rows !== undefined && rows.missing === rows.total) call("allocate_matrix", slot);
      },
      end: async (slot, count) => {
        const rows = matrices.get(slot);
        if (rows === undefined || (rows.missing -= count) > 0) return; // a vector, or incomplete
        await this.upload(slot);
        call("free_matrix", slot);
      },
      finish: () => this.upload(),
    };
  }

  /** Copy a matrix, or without a slot all vectors, from the core's memory. */
  private async upload(slot = ""): Promise<void> {
    const uploads = this.core.withText(slot, (at, size) => this.core.json<Upload[]>("gpu_uploads", at, size));
    this.write(this.buffers, uploads);
    await this.gpu.device.queue.onSubmittedWorkDone(); // else the browser keeps copies of all
    this.check();
  }

  /** Copy the adapter that the core has under construction, and give it a number. */
  async addAdapter(number: number): Promise<void> {
    const plan = this.planAdapter();
    const ends = this.watch("Engine.loadAdapter");
    const buffers = plan.buffers.map(([name, bytes]) => this.makeBuffer(name, bytes));
    const all = [...this.buffers, ...buffers];
    this.write(all, plan.uploads);
    this.gpu.device.queue.writeBuffer(buffers[0], 0, Int32Array.of(number));
    const pipelines = await this.compile(plan);
    const points = plan.points.map((dispatches) => dispatches.map((each) => this.makeDispatch(all, pipelines, each)));
    this.adapters.set(number, { buffers, points });
    await ends();
  }

  /** Run a step of the core, with the results that it waits for. */
  async step(): Promise<void> {
    for (;;) {
      this.check();
      try {
        this.core.call("step");
        return;
      } catch (error) {
        if (!(error instanceof Suspended)) {
          this.core.call("gpu_abandon");
          throw error;
        }
      }
      const bytes = await this.result();
      this.core.bytes(this.core.call("gpu_result", bytes.length), bytes.length).set(bytes);
    }
  }

  // ------------------------------------------------------------- called by the core

  private writePages(pages: Int32Array<ArrayBuffer>): void {
    const n = 2 * this.rows.get("writes")!;
    for (let begin = 0; begin < pages.length; begin += n) {
      const part = pages.subarray(begin, begin + n);
      this.set("writes", part);
      this.set("params", Int32Array.of(part.length / 2), 8);
      this.submit([{ pass: "write_pages", n: 1 }]);
    }
  }

  private forward(inputs: Int32Array<ArrayBuffer>[]): void {
    const [tokens] = inputs;
    const n = tokens.length / 4;
    this.set("params", Int32Array.of(n));
    INPUTS.forEach((name, i) => this.set(name, inputs[i]));
    this.submit([{ pass: "forward", n, adapters: adaptersOf(tokens) }]);
  }

  /** Run steps of which each draws the tokens of the next; the inputs cover all steps. */
  private decode(nSteps: number, inputs: Int32Array<ArrayBuffer>[]): void {
    const [tokens] = inputs;
    const n = tokens.length / 4 / nSteps;
    const adapters = adaptersOf(tokens);
    this.set("params", Int32Array.of(n, n));
    this.set("head_rows", Int32Array.from({ length: n }, (_, i) => i));
    STEP_INPUTS.forEach((name, i) => this.set(name === "page_table" ? name : `next_${name}`, inputs[i]));
    const encoder = this.gpu.device.createCommandEncoder();
    const drawn = this.named.get("drawn")!;
    const drawnBytes = (n * drawn.size) / this.rows.get("drawn")!;
    for (let step = 0; step < nSteps; ++step) {
      STEP_INPUTS.forEach((name, i) => {
        const bytes = inputs[i].byteLength / nSteps;
        if (name !== "page_table" && bytes > 0) encoder.copyBufferToBuffer(this.named.get(`next_${name}`)!, step * bytes, this.named.get(name)!, 0, bytes);
      });
      const next: Run[] = step === 0 ? [] : [{ pass: "next_tokens", n }];
      this.encodePasses(encoder, [...next, { pass: "forward", n, adapters }, { pass: "head", n }, { pass: "draw", n }]);
      encoder.copyBufferToBuffer(drawn, 0, this.named.get("all_drawn")!, step * drawnBytes, drawnBytes);
    }
    this.copyRows(encoder, "all_drawn", 0, n * nSteps);
    this.gpu.device.queue.submit([encoder.finish()]);
  }

  private runHeads([rows, hidden, draws]: Int32Array<ArrayBuffer>[], passes: Pass[], result: string): void {
    const n = rows.length;
    this.set("params", Int32Array.of(n), 4);
    this.set("head_rows", rows);
    this.set("head_in", hidden);
    if (draws !== undefined) this.set("draws", draws);
    this.submit(passes.map((pass) => ({ pass, n })), (encoder) => this.copyRows(encoder, result, 0, n));
  }

  // ------------------------------------------------------------- private

  private planAdapter(): AdapterPlan {
    try {
      return this.core.json<AdapterPlan>("gpu_adapter");
    } catch (error) {
      throw new WhetError(`Engine.loadAdapter: device is "gpu", which has no kernel for ${missingKernel(error)}. Merge the adapter into the model, or omit device.`);
    }
  }

  /** Encode and submit passes, and copies of results. */
  private submit(runs: Run[], copy: (encoder: GPUCommandEncoder) => void = () => {}): void {
    const encoder = this.gpu.device.createCommandEncoder();
    this.encodePasses(encoder, runs);
    copy(encoder);
    this.gpu.device.queue.submit([encoder.finish()]);
  }

  private encodePasses(encoder: GPUCommandEncoder, runs: Run[]): void {
    const commands = encoder.beginComputePass();
    for (const run of runs) this.encode(commands, run);
    commands.end();
  }

  private encode(commands: GPUComputePassEncoder, { pass, n, adapters = [] }: Run): void {
    const one = ({ variants, count }: Dispatch) => {
      const rows = COUNTS[count] === "experts" ? n * this.nUsedExperts : n;
      const variant = variants.find((each) => each.rows >= rows) ?? variants[variants.length - 1];
      if (variant.pipeline === undefined) return;
      commands.setPipeline(variant.pipeline);
      commands.setBindGroup(0, variant.group!);
      commands.dispatchWorkgroups(variant.groups, Math.ceil(rows / variant.rows));
    };
    this.passes[pass].forEach((dispatch, i) => {
      one(dispatch);
      const point = pass === "forward" && adapters.length > 0 ? this.points.get(i + 1) : undefined;
      if (point !== undefined) for (const number of adapters) this.adapters.get(number)!.points[point].forEach(one);
    });
  }

  /** Copy the hidden states of tokens to the awaited result. */
  private copyHidden(encoder: GPUCommandEncoder, tokens: Int32Array): void {
    tokens.forEach((token, i) => this.copyRows(encoder, "hidden", token, 1, i, tokens.length));
  }

  /** Copy n rows from `first` on to row `at` of the awaited result, which has `total` rows. */
  private copyRows(encoder: GPUCommandEncoder, name: string, first: number, n: number, at = 0, total = n): void {
    const source = this.named.get(name)!;
    const bytes = source.size / this.rows.get(name)!;
    this.awaited = total * bytes;
    if (this.staging === undefined || this.staging.size < this.awaited) {
      this.staging?.destroy();
      this.staging = this.gpu.device.createBuffer({ size: this.awaited, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
    }
    encoder.copyBufferToBuffer(source, first * bytes, this.staging, at * bytes, n * bytes);
  }

  private async result(): Promise<Uint8Array> {
    const staging = this.staging!;
    await staging.mapAsync(GPUMapMode.READ, 0, this.awaited).catch(async (error: Error) => {
      await Promise.race([this.gpu.device.lost, new Promise((resolve) => setTimeout(resolve, 1000))]); // it may be known a little later
      throw this.failure ?? new WhetError(`Engine: the GPU failed: ${error.message} Load the model again, or omit device.`);
    });
    const bytes = new Uint8Array(staging.getMappedRange(0, this.awaited)).slice();
    staging.unmap();
    return bytes;
  }

  private check(): void {
    if (this.failure !== undefined) throw this.failure;
  }

  /** Collect the errors of the following commands; the function that is returned throws the first. */
  private watch(where: string): () => Promise<void> {
    const { device } = this.gpu;
    device.pushErrorScope("validation");
    device.pushErrorScope("out-of-memory");
    return async () => {
      const [full, invalid] = await Promise.all([device.popErrorScope(), device.popErrorScope()]);
      if (full !== null) throw new OutOfMemoryError(`${where}: the GPU's memory is full. Load a smaller model, pass a smaller kvBytes or maxBatch, or omit device.`);
      if (invalid !== null) throw new WhetError(`${where}: the GPU failed: ${invalid.message} Omit device.`);
      this.check();
    };
  }

  private makeBuffer(label: string, bytes: number): GPUBuffer {
    return this.gpu.device.createBuffer({ label, size: Math.ceil(bytes / 4) * 4, usage: GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST });
  }

  private write(buffers: GPUBuffer[], uploads: Upload[]): void {
    for (const [buffer, offset, address, bytes] of uploads) this.gpu.device.queue.writeBuffer(buffers[buffer], offset, this.core.memory.buffer, address, bytes);
  }

  private set(name: string, values: Int32Array<ArrayBuffer>, offset = 0): void {
    if (values.length > 0) this.gpu.device.queue.writeBuffer(this.named.get(name)!, offset, values);
  }

  private compile({ pipelines }: Made): Promise<Pipeline[]> {
    return Promise.all(
      pipelines.map(([constants, files]) => {
        const code = constants + files.map((file) => kernels[file]).join("");
        const found = this.pipelines.get(code) ?? this.makePipeline(code, files[files.length - 1]);
        this.pipelines.set(code, found);
        return found;
      }),
    );
  }

  private async makePipeline(code: string, label: string): Promise<Pipeline> {
    const { device } = this.gpu;
    const entries = [...code.matchAll(BINDING)].map(([, binding, access]) => ({
      binding: Number(binding),
      visibility: GPUShaderStage.COMPUTE,
      buffer: { type: access === "read" ? ("read-only-storage" as const) : ("storage" as const) },
    }));
    const layout = device.createBindGroupLayout({ entries });
    const module = device.createShaderModule({ label, code });
    const pipeline = await device.createComputePipelineAsync({ label, layout: device.createPipelineLayout({ bindGroupLayouts: [layout] }), compute: { module, entryPoint: "main" } });
    return { pipeline, layout };
  }

  private makeDispatch(buffers: GPUBuffer[], pipelines: Pipeline[], [variants, count]: PlannedDispatch): Dispatch {
    const made = variants.map(([rows, groups, number, bound]) => {
      if (number === SKIP) return { rows, groups };
      const { pipeline, layout } = pipelines[number];
      const entries = bound.map((buffer, binding) => ({ binding, resource: { buffer: buffers[buffer] } }));
      return { rows, groups, pipeline, group: this.gpu.device.createBindGroup({ layout, entries }) };
    });
    return { variants: made, count };
  }
}
