/** Batches of rows without padding, as in whet.learner.batch: equal prompts are stored once. */

/** Token ids of a prompt and of the completion that is trained on, at least one each. */
export interface Row {
  prompt: readonly number[];
  completion: readonly number[];
}

/** Compare token ids as Python compares lists. */
function compare(a: readonly number[], b: readonly number[]): number {
  const i = a.findIndex((id, at) => id !== b[at]);
  return i < 0 || i >= b.length ? a.length - b.length : a[i] - b[i];
}

/** Count the completion tokens. */
export const countTokens = (rows: readonly Row[]) => rows.reduce((sum, { completion }) => sum + completion.length, 0);

/**
 * Pack rows in an order that depends only on their tokens, so that gradients are summed in it. The fields are documented at
 * PackedBatch in Python; `places` are the targets' indices among the completion tokens of all rows, in the order of the rows.
 */
export function packBatch(rows: readonly Row[]) {
  const order = rows.map((_, i) => i).sort((i, j) => compare(rows[i].prompt, rows[j].prompt) || compare(rows[i].completion, rows[j].completion));
  const tokens: number[] = [];
  const positions: number[] = [];
  const [groupOffsets, qOffsets, kOffsets] = [[0], [0], [0]];
  const keyRows: number[] = [];
  const [predictors, targets, places]: number[][] = [[], [], []];
  /** Add a sequence after the keys of its prompt; return the indices of its tokens. */
  const add = (ids: readonly number[], prefix: readonly number[]): number[] => {
    const own = ids.map((_, i) => tokens.length + i);
    positions.push(...ids.map((_, i) => prefix.length + i));
    tokens.push(...ids);
    keyRows.push(...prefix, ...own);
    qOffsets.push(tokens.length);
    kOffsets.push(keyRows.length);
    return own;
  };
  let prefix: number[] = [];
  for (const [at, i] of order.entries()) {
    const { prompt, completion } = rows[i];
    if (at === 0 || compare(prompt, rows[order[at - 1]].prompt) !== 0) {
      if (at > 0) groupOffsets.push(tokens.length);
      prefix = add(prompt, []);
    }
    const own = completion.length > 1 ? add(completion.slice(0, -1), prefix) : []; // the last token is not an input
    predictors.push(prefix[prefix.length - 1], ...own);
    targets.push(...completion);
    const first = countTokens(rows.slice(0, i));
    places.push(...completion.map((_, t) => first + t));
  }
  groupOffsets.push(tokens.length);
  return { tokens, positions, groupOffsets, qOffsets, kOffsets, keyRows, ...invert(keyRows, tokens.length), predictors, targets, places };
}

/** Return the positions of each token in keyRows, ascending, in CSR form. */
function invert(keyRows: readonly number[], n: number): { readerOffsets: number[]; readers: number[] } {
  const readerOffsets = Array<number>(n + 1).fill(0);
  for (const row of keyRows) ++readerOffsets[row + 1];
  for (let i = 0; i < n; ++i) readerOffsets[i + 1] += readerOffsets[i];
  const next = readerOffsets.slice();
  const readers = Array<number>(keyRows.length);
  for (const [at, row] of keyRows.entries()) readers[next[row]++] = at;
  return { readerOffsets, readers };
}

/** Split rows into micro-batches of at most maxTokens packed tokens, in their order; a longer row has its own. */
export function splitMicroBatches<R extends Row>(rows: readonly R[], maxTokens: number): R[][] {
  const parts: R[][] = [];
  let size = Infinity;
  for (const row of rows) {
    const last = parts.at(-1);
    const isShared = last !== undefined && last.some(({ prompt }) => compare(prompt, row.prompt) === 0);
    const added = row.completion.length - 1 + (isShared ? 0 : row.prompt.length);
    if (last === undefined || size + added > maxTokens) {
      parts.push([row]);
      size = row.prompt.length + row.completion.length - 1;
    } else {
      last.push(row);
      size += added;
    }
  }
  return parts;
}
