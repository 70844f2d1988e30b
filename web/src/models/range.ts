/** Weights that the format they are packed in cannot represent, by the rules of RangeCheck in whet.models.loading. */
import { WhetError } from "../core/errors.js";
import type { lossFields } from "../facts.js";
import { nameInSettings, type WeightFormat } from "./formats.js";
import type { RowSlice } from "./slices.js";

/** What rows lose to the range of a format: its index, the largest |w| and its limit, and sums of w^2 and (w - packed w)^2. */
export type PackingLoss = Record<(typeof lossFields)[number], number>;

export class RangeCheck {
  private readonly tensors = new Map<string, PackingLoss & { name: string }>();

  constructor(
    private readonly formats: Map<string, WeightFormat>,
    private readonly where: string,
  ) {}

  /** Check rows and add their sums to their tensor's: a weight beyond the range of the format is an error. */
  add({ slot, tensor: { name } }: RowSlice, loss: PackingLoss): void {
    if (loss.largest === Infinity) throw new WhetError(`${this.label(name)} contains NaN or infinity. Save the model again.`);
    if (loss.largest > loss.limit) {
      throw new WhetError(`${this.label(name)} holds a weight of magnitude ${show(loss.largest)}, beyond ${show(loss.limit)}, the largest of ${this.nameOf(loss)}. ${this.fix(loss)}`);
    }
    const key = `${slot} ${name}`;
    const sum = this.tensors.get(key);
    if (sum === undefined) {
      this.tensors.set(key, { ...loss, name });
    } else {
      sum.squaredNorm += loss.squaredNorm;
      sum.squaredLost += loss.squaredLost;
      sum.largest = Math.max(sum.largest, loss.largest);
    }
  }

  /** Check the tensors: losing more than half of a norm is an error. */
  finish(): void {
    for (const loss of this.tensors.values()) {
      if (loss.squaredLost <= loss.squaredNorm / 4) continue;
      const percent = Math.round(100 * Math.sqrt(loss.squaredLost / loss.squaredNorm));
      throw new WhetError(
        `${this.label(loss.name)} would lose ${percent}% of its norm in ${this.nameOf(loss)}, whose scales round to 0 below 2^-25: its largest weight has magnitude ${show(loss.largest)}. ${this.fix(loss)}`,
      );
    }
  }

  private label(name: string): string {
    return `Engine.load: ${this.where}: ${name}`;
  }

  private nameOf({ format }: PackingLoss): string {
    const found = [...this.formats.values()].find(({ index }) => index === format);
    return nameInSettings(found!.name);
  }

  private fix(loss: PackingLoss): string {
    return this.nameOf(loss) === "bf16" ? 'Pass weights: "float32".' : 'Pass weights: "bf16" or "float32".';
  }
}

const show = (x: number) => x.toPrecision(4);
