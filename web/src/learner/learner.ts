/** Learner of low-rank adapters: SFT and GRPO as loops over log-probs, losses, gradients and steps.
 *
 * The engine's worker computes (host.ts); losses and rewards are computed here, in the page. Names, defaults and results equal
 * those that whet.Learner, whet.algorithms.SFT and GRPO have in float32. */
import { show, WhetError } from "../core/errors.js";
import type { GenerateOptions, Prompt, Token } from "../settings/requests.js";
import { isTemperature } from "../settings/sampling.js";
import { countTokens, type Row, splitMicroBatches } from "./batch.js";
import { groupAdvantages, grpoLoss, importanceWeights, type Loss, sftLoss } from "./losses.js";
import {
  checkGrpo, checkObject, checkRows, checkSft, checkStep, type Completion, type GrpoOptions, type GrpoRow, type GrpoRun, type LearnProgress, type Run, type RunOptions, type SftRow, type StepOptions,
} from "./options.js";
import { peftFiles } from "./peft.js";
import type { Action, Actions, Example, Factors, LearnerInfo } from "./protocol.js";
import { seedWords } from "./random.js";
import { checkName, writeSaved } from "./saved.js";

/** The Engine's methods that a Learner calls. */
export interface LearningEngine {
  generate(prompt: Prompt, options: GenerateOptions): AsyncGenerator<Token, void>;
  /** Run an action in the engine's worker. */
  learn<A extends Action>(action: A, given: Actions[A][0], where: string, signal?: AbortSignal): Promise<Actions[A][1]>;
  toPrompt(prompt: Prompt, where: string): Example["prompt"];
}

/** A sampled completion, and the sampler's log-probs. */
interface Sampled extends Row, Pick<Completion, "text" | "finish"> {
  completion: number[];
  logprobs: number[];
  advantage: number;
}

/** Low-rank adapters of a model in training. Created by Engine.learner. */
export class Learner {
  private isRunning = false;
  private isClosed = false;

  /** @internal */
  constructor(
    private readonly engine: LearningEngine,
    private readonly info: LearnerInfo,
  ) {}

  /** Number of trained parameters. */
  get nParameters(): number {
    return this.info.nParameters;
  }

  /**
   * Fine-tune on completions: minimise their mean negative log-likelihood per token.
   *
   * @param rows prompts and completions. A text ends with EOS; a completion of messages is the assistant's turn in the chat template.
   * @returns the progress of every step.
   * @throws WhetError an invalid row or option. OutOfMemoryError: the learner stays usable, and keeps the steps before.
   */
  async sft(rows: readonly SftRow[], options: RunOptions = {}): Promise<LearnProgress[]> {
    const where = "Learner.sft";
    const { signal, ...given } = checkObject(options, where) as RunOptions;
    checkRows(rows, ["prompt", "completion"], where);
    const run = checkSft(given, rows.length, where);
    return this.run(where, signal, async () => {
      const examples = await this.encode(rows, where, signal);
      return this.repeat(run, options.onProgress, async (step) => {
        const batch = takeRows(examples, step, run.batchSize);
        const nTokens = countTokens(batch);
        return { ...(await this.update(batch, run, 1, (logprobs) => sftLoss(logprobs, nTokens), where, signal)), nTokens };
      });
    });
  }

  /**
   * Reinforce completions by a reward: sample a group of completions per prompt, and raise the log-probs of those above the
   * group's mean (GRPO with the loss "dapo", without a KL term).
   *
   * @param rows prompts, as for Engine.generate. Further fields are for the reward.
   * @param options.reward called for every completion, in this page or worker.
   * @returns the progress of every step.
   * @throws WhetError an invalid row, option or reward. OutOfMemoryError: the learner stays usable, and keeps the steps before.
   */
  async grpo<R extends GrpoRow>(rows: readonly R[], options: GrpoOptions<R>): Promise<LearnProgress[]> {
    const where = "Learner.grpo";
    const { signal, ...given } = checkObject(options, where) as unknown as GrpoOptions<R>;
    checkRows(rows, ["prompt"], where);
    const { run, drawn } = checkGrpo(given as GrpoOptions, rows.length, where);
    return this.run(where, signal, async () => {
      const prompts = await this.encode(rows.map(({ prompt }) => ({ prompt })), where, signal); // without a completion to imitate
      return this.repeat(run, options.onProgress, async (step) => {
        const adapter = await this.sync();
        const seed = seedWords([run.seed, BigInt(step)], 1)[0]; // as in Python
        const indices = takeRows([...rows.keys()], step, run.batchSize);
        const common = { ...drawn, seed, n: run.groupSize, adapter };
        const groups = await abortOnError(signal, (either) =>
          Promise.all(indices.map((i, promptIndex) => this.sample(rows[i].prompt, prompts[i].prompt, { ...common, promptIndex, signal: either }))),
        );
        const rewards = await Promise.all(groups.map((group, g) => Promise.all(group.map((completion) => score(given.reward, completion, rows[indices[g]], indices[g], where)))));
        const sampled = groups.flat();
        for (const [i, advantage] of rewards.flatMap(groupAdvantages).entries()) sampled[i].advantage = advantage;
        const updated = await this.reinforce(sampled, run, where, signal);
        return { ...updated, nTokens: countTokens(sampled), meanReward: rewards.flat().reduce((sum, x) => sum + x, 0) / sampled.length };
      });
    });
  }

  private async sample(prompt: Prompt, ids: readonly number[], options: GenerateOptions): Promise<Sampled[]> {
    const found = Array.from({ length: options.n! }, (): Sampled => ({ prompt: ids, completion: [], text: "", finish: "length", logprobs: [], advantage: 0 }));
    for await (const { sample, token, text, logprob, finish = "length" } of this.engine.generate(prompt, options)) {
      found[sample].completion.push(token);
      found[sample].logprobs.push(logprob);
      found[sample].text += text;
      found[sample].finish = finish;
    }
    return found;
  }

  /** Update on completions by their advantages. On a quantised model, where only the sampler rounds inputs, importance weights
   * correct for the difference. */
  private reinforce(sampled: Sampled[], run: GrpoRun, where: string, signal?: AbortSignal) {
    const nTokens = countTokens(sampled);
    const firsts = new Map<Sampled, { old: Float32Array; weights: Float32Array }>(); // by the first row of a micro-batch
    const perToken = (rows: readonly Sampled[], numbers: (row: Sampled) => number[]) => Float32Array.from(rows.flatMap(numbers));
    const loss = (logprobs: Float32Array, rows: readonly Sampled[]) => {
      const sampler = perToken(rows, (row) => row.logprobs);
      const first = firsts.get(rows[0]) ?? { old: logprobs, weights: this.info.isQuantised ? importanceWeights(logprobs, sampler, run.samplerCap) : logprobs.map(() => 1) };
      firsts.set(rows[0], first);
      const advantages = perToken(rows, ({ advantage, completion }) => completion.map(() => advantage));
      return grpoLoss(logprobs, { ...first, advantages }, run.epsilon, nTokens);
    };
    return this.update(sampled, run, run.numIterations, loss, where, signal, run.temperature);
  }

  /** Return means over updates of a loss, whose gradients are summed over micro-batches. */
  private async update<R extends Row>(
    rows: readonly R[], { maxTokensPerStep, ...run }: Run, nUpdates: number, loss: (logprobs: Float32Array, rows: readonly R[]) => Loss, where: string, signal?: AbortSignal, temperature = 1,
  ): Promise<{ loss: number; gradNorm: number }> {
    const total = { loss: 0, gradNorm: 0 };
    for (let i = 0; i < nUpdates; ++i) {
      for (const part of splitMicroBatches(rows, maxTokensPerStep || Infinity)) {
        const logprobs = await this.learn("logprobs", { rows: part.map(({ prompt, completion }) => ({ prompt, completion })), temperature, adapters: true, keep: true }, where, signal);
        const { value, gradient } = loss(logprobs, part);
        await this.learn("backward", gradient, where, signal);
        total.loss += value / nUpdates;
      }
      total.gradNorm += (await this.learn("step", run, where, signal)) / nUpdates;
    }
    return total;
  }

  /** Run the steps, and report each. */
  private async repeat({ steps }: { steps: number }, onProgress: RunOptions["onProgress"], runStep: (step: number) => Promise<Omit<LearnProgress, "step" | "steps">>): Promise<LearnProgress[]> {
    const found: LearnProgress[] = [];
    for (let step = 0; step < steps; ++step) {
      const progress = { step: step + 1, steps, ...(await runStep(step)) };
      found.push(progress);
      onProgress?.(progress);
    }
    return found;
  }

  /** Run one loop at a time, and discard the gradients of a step that did not end. */
  private async run<T>(where: string, signal: AbortSignal | undefined, work: () => Promise<T>): Promise<T> {
    if (signal !== undefined && !(signal instanceof AbortSignal)) throw new WhetError(`${where}: signal is ${show(signal)}, expected an AbortSignal.`);
    if (this.isRunning) throw new WhetError(`${where}: another run of this learner is in progress. Wait for it, or abort it with its signal.`);
    this.isRunning = true;
    try {
      return await work();
    } catch (error) {
      await this.zeroGrad().catch(() => {}); // the worker may be closed
      throw error;
    } finally {
      this.isRunning = false;
    }
  }

  private encode(rows: readonly (SftRow | GrpoRow)[], where: string, signal?: AbortSignal): Promise<Row[]> {
    const examples = rows.map((row, i) => {
      const at = `${where}: rows[${i}]`;
      const completion = "completion" in row ? row.completion : undefined;
      return { prompt: this.engine.toPrompt(row.prompt, at), completion: typeof completion === "object" ? (this.engine.toPrompt(completion, at) as Int32Array) : completion };
    });
    return this.learn("encode", examples, where, signal);
  }

  // ------------------------------------------------------------- your own loop

  /**
   * Return the log-probs of each row's completion tokens, given its prompt and the tokens before. They are computed at once;
   * rows of equal prompts share the computation of the prompt.
   *
   * @param options.temperature divides the logits. Default: 1.
   * @param options.adapters false: of the base model. Default: true.
   */
  async logprobs(rows: readonly SftRow[], options: { temperature?: number; adapters?: boolean; signal?: AbortSignal } = {}): Promise<Float32Array[]> {
    const where = "Learner.logprobs";
    const { temperature = 1, adapters = true, signal, ...unknown } = options;
    if (Object.keys(unknown).length > 0) throw new WhetError(`${where}: unknown option ${Object.keys(unknown)[0]}. Options: temperature, adapters, signal.`);
    if (!isTemperature(temperature)) throw new WhetError(`${where}: temperature is ${show(temperature)}, expected a number from 1e-30 to 1e30.`);
    checkRows(rows, ["prompt", "completion"], where);
    const encoded = await this.encode(rows, where, signal);
    const flat = await this.learn("logprobs", { rows: encoded, temperature, adapters, keep: adapters }, where, signal);
    let at = 0;
    return encoded.map(({ completion }) => flat.subarray(at, (at += completion.length)));
  }

  /** Add the gradients of the adapters, from the gradients of the last log-probs: for each row a number per token. */
  async backward(gradients: readonly ArrayLike<number>[]): Promise<void> {
    const where = "Learner.backward";
    const flat = Float32Array.from(gradients.flatMap((each) => Array.from(each)));
    if (!flat.every(Number.isFinite)) throw new WhetError(`${where}: gradients contain NaN or infinity. Check the loss of this batch.`);
    await this.learn("backward", flat, where);
  }

  /** Update the adapters by AdamW, set the gradients to zero, and return the norm that they had. */
  async step(options: StepOptions = {}): Promise<number> {
    const where = "Learner.step";
    return this.learn("step", checkStep(options, where), where);
  }

  /** Set all gradients to zero. */
  async zeroGrad(): Promise<void> {
    await this.learn("zeroGrad", undefined, "Learner.zeroGrad");
  }

  /** Return the gradients by module, A (rank, k) and B (n, rank). */
  async gradients(): Promise<Map<string, Factors>> {
    return this.learn("gradients", undefined, "Learner.gradients");
  }

  // ------------------------------------------------------------- results

  /** Copy the adapters to the engine and return their number, for `adapter` of its calls. The number of an earlier copy is invalid. */
  async sync(): Promise<number> {
    return this.learn("sync", undefined, "Learner.sync");
  }

  /**
   * Return the files of a PEFT folder, which Engine.loadAdapter, native Whet and PEFT read.
   *
   * @param model name or path of the base model in the files. Default: the file or URL that was loaded.
   */
  async toPeft(model: string = this.info.model): Promise<{ files: Record<string, Uint8Array<ArrayBuffer>> }> {
    const saved = await this.learn("save", undefined, "Learner.toPeft");
    return { files: peftFiles(saved, this.info.alpha, model) };
  }

  /** Save the adapters in the origin's private file system, from which openAdapter(name) returns them. */
  async save(name: string): Promise<void> {
    const where = "Learner.save";
    checkName(name, where);
    await writeSaved(name, (await this.toPeft()).files, where);
  }

  /** Free the adapters' memory. Copies in the engine remain. */
  async close(): Promise<void> {
    await this.learn("close", undefined, "Learner.close");
    this.isClosed = true;
  }

  private async learn<A extends Action>(action: A, given: Actions[A][0], where: string, signal?: AbortSignal): Promise<Actions[A][1]> {
    if (this.isClosed) throw new WhetError(`${where}: the learner is closed. Create another: engine.learner().`);
    return this.engine.learn(action, given, where, signal);
  }
}

/** Return the rows of a step, from 0, in their order. */
const takeRows = <T>(rows: readonly T[], step: number, n: number) => Array.from({ length: n }, (_, i) => rows[(step * n + i) % rows.length]);

async function score<R>(reward: (completion: Completion, row: R) => number | Promise<number>, { text, completion, finish }: Sampled, row: R, i: number, where: string): Promise<number> {
  const found = await reward({ text, tokens: completion, finish }, row);
  if (typeof found !== "number" || !Number.isFinite(found)) throw new WhetError(`${where}: reward returned ${show(found)} for ${show(text)} of rows[${i}], expected a finite number.`);
  return found;
}

/** Run work with a signal that is also aborted when it fails. */
async function abortOnError<T>(signal: AbortSignal | undefined, work: (either: AbortSignal) => Promise<T>): Promise<T> {
  const exit = new AbortController();
  try {
    return await work(signal === undefined ? exit.signal : AbortSignal.any([signal, exit.signal]));
  } catch (error) {
    exit.abort();
    throw error;
  }
}
