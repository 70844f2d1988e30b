// delta = the weighted sum of a token's experts, plus the shared expert in delta, if there is one, times the sigmoid of
// its gate.
@group(0) @binding(0) var<storage, read> results: array<f32>;  // (tokens, N_USED, D)
@group(0) @binding(1) var<storage, read> chosen_weights: array<f32>;
@group(0) @binding(2) var<storage, read> shared_gates: array<f32>;
@group(0) @binding(3) var<storage, read_write> delta: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
  if (id.x >= D) { return; }
  var sum = 0.0;
  if (HAS_SHARED) { sum = delta[id.y * D + id.x]; }
  if (HAS_SHARED_GATE) { sum /= 1.0 + exp(-shared_gates[id.y]); }
  for (var j = 0u; j < N_USED; j++) {
    sum += chosen_weights[id.y * N_USED + j] * results[(id.y * N_USED + j) * D + id.x];
  }
  delta[id.y * D + id.x] = sum;
}
