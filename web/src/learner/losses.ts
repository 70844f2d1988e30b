/** Losses with their gradients in closed form, in float64 as in whet.losses, over the completion tokens of a micro-batch.
 *
 * Losses and gradients of micro-batches add up if each gets the number of completion tokens of the whole batch, nTokens. */

export interface Loss {
  value: number;
  /** Derivative with respect to the log-prob of each token. */
  gradient: Float32Array;
}

/** Return the mean negative log-likelihood, in nats: sft_loss. */
export function sftLoss(logprobs: Float32Array, nTokens: number): Loss {
  return { value: -logprobs.reduce((sum, x) => sum + x, 0) / nTokens, gradient: new Float32Array(logprobs.length).fill(-1 / nTokens) };
}

/** Terms of grpoLoss, one number per token. */
export interface GrpoTerms {
  /** Log-probs of the policy that sampled. */
  old: Float32Array;
  advantages: Float32Array;
  /** Importance weights. */
  weights: Float32Array;
}

/** Return sum w l / nTokens with l = -min(rho A, clip(rho, 1 - epsilon, 1 + epsilon) A), rho = exp(logprobs - old): grpo_loss
 * with loss_type "dapo". */
export function grpoLoss(logprobs: Float32Array, { old, advantages, weights }: GrpoTerms, epsilon: number, nTokens: number): Loss {
  const gradient = new Float32Array(logprobs.length);
  let value = 0;
  for (const [i, logprob] of logprobs.entries()) {
    const ratio = Math.exp(logprob - old[i]);
    const isInside = ratio >= 1 - epsilon && ratio <= 1 + epsilon;
    const [whole, clipped] = [ratio * advantages[i], Math.min(Math.max(ratio, 1 - epsilon), 1 + epsilon) * advantages[i]];
    const slope = whole < clipped ? 1 : whole > clipped ? +isInside : (1 + +isInside) / 2;
    value -= (weights[i] * Math.min(whole, clipped)) / nTokens;
    gradient[i] = (-weights[i] * advantages[i] * slope * ratio) / nTokens;
  }
  return { value, gradient };
}

/** Return min(exp(logprobs - sampler), cap): importance_weights with the correction "token_truncate". */
export function importanceWeights(logprobs: Float32Array, sampler: Float32Array, cap: number): Float32Array {
  return logprobs.map((logprob, i) => Math.min(Math.exp(logprob - sampler[i]), cap));
}

/** Return (reward - mean) / population standard deviation of a group; 0 if that is below 1e-8: compute_batch_group_advantages. */
export function groupAdvantages(rewards: readonly number[]): number[] {
  const mean = rewards.reduce((sum, x) => sum + x, 0) / rewards.length;
  const deviation = Math.sqrt(rewards.reduce((sum, x) => sum + (x - mean) ** 2, 0) / rewards.length);
  return rewards.map((x) => (deviation < 1e-8 ? 0 : (x - mean) / deviation));
}
