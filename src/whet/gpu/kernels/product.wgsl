// y = x w^T + bias for outputs FIRST ... FIRST + COUNT of rows of Y_STRIDE; ADDS: y += it. HAS_NUMBER: only for tokens
// of this adapter.
// A workgroup computes the 16 outputs of a panel for ROWS rows: lane j + 16 s adds the steps s, s + 4, ... of output j.
@group(0) @binding(0) var<storage, read> weights: array<u32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;
@group(0) @binding(4) var<storage, read> params: array<u32>;
@group(0) @binding(5) var<storage, read> number: array<i32>;
@group(0) @binding(6) var<storage, read> tokens: array<vec4i>;
var<workgroup> sums: array<f32, 64u * ROWS>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let j = lane % 16u;
  let n = params[N_PARAM];
  var rows = array<u32, ROWS>();
  var sum = array<f32, ROWS>();
  for (var r = 0u; r < ROWS; r++) { rows[r] = min(group.y * ROWS + r, n - 1u); }
  for (var step = lane / 16u; step < (K + 31u) / 32u; step += 4u) {
    let s = scales(group.x, step, j);
    var part = array<vec4f, ROWS>();  // of the weights' integers, then of the inputs
    for (var w = 0u; w < 4u; w++) {
      let u = integers(group.x, step, w, j);
      for (var r = 0u; r < ROWS; r++) {
        let low = inputs(rows[r], 32u * step + 4u * w);
        let high = inputs(rows[r], 32u * step + 16u + 4u * w);
        part[r] += vec4f(dot(u.low, low), dot(u.high, high), 0.0, 0.0);
        if (HAS_OFFSETS) { part[r] += vec4f(0.0, 0.0, dot(low, vec4f(1.0)), dot(high, vec4f(1.0))); }
      }
    }
    for (var r = 0u; r < ROWS; r++) { sum[r] += dot(s, part[r]); }
  }
  for (var r = 0u; r < ROWS; r++) { sums[64u * r + lane] = sum[r]; }
  workgroupBarrier();
  for (var i = lane; i < 16u * ROWS; i += 64u) {
    let r = i / 16u;
    let output = 16u * group.x + i % 16u;
    if (output >= COUNT || group.y * ROWS + r >= n) { continue; }
    let at = 64u * r + i % 16u;
    var value = sums[at] + sums[at + 16u] + sums[at + 32u] + sums[at + 48u];
    if (HAS_BIAS) { value += bias[FIRST + output]; }
    if (SOFTCAP > 0.0) { value = SOFTCAP * tanh(clamp(value / SOFTCAP, -20.0, 20.0)); }
    if (HAS_NUMBER) {
      if (tokens[group.y * ROWS + r].w != number[0]) { continue; }
    }
    let place = (group.y * ROWS + r) * Y_STRIDE + FIRST + output;
    if (ADDS) { value += y[place]; }
    y[place] = value;
  }
}
