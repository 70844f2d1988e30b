// The 16 outputs of a panel for ROWS rows: lane j + 16 s adds the steps s, s + 4, ... of output j. ACTIVATES: x is the
// activation of gate and up projections. NORMS: x is normed, by its RMS and the weights norm_weight, which need no pass of
// their own: the sum of squares is found along with the product.
@group(0) @binding(7) var<storage, read> norm_weight: array<f32>;
var<workgroup> squares: array<f32, 64>;
var<workgroup> sums: array<f32, 64u * ROWS>;

fn norm_weights(i: u32) -> vec4f {
  var four = vec4f(0.0);
  for (var b = 0u; b < 4u; b++) {
    if (i + b < K) { four[b] = norm_weight[i + b]; }
  }
  return four;
}

fn activated(row: u32, i: u32) -> vec4f {
  let gate = inputs(row, i);
  var up = vec4f(0.0);
  if (IS_GATED) { up = up_inputs(row, i); }
  return vec4f(activate(gate.x, up.x), activate(gate.y, up.y), activate(gate.z, up.z), activate(gate.w, up.w));
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let j = lane % 16u;
  let n = params[N_PARAM];
  var rows = array<u32, ROWS>();
  var sum = array<f32, ROWS>();
  for (var r = 0u; r < ROWS; r++) { rows[r] = min(group.y * ROWS + r, n - 1u); }
  var square = 0.0;
  for (var step = lane / 16u; step < (K + 31u) / 32u; step += 4u) {
    let s = scales(group.x, step, j);
    var part = array<vec4f, ROWS>();  // of the weights' integers, then of the inputs
    for (var w = 0u; w < 4u; w++) {
      let u = integers(group.x, step, w, j);
      for (var r = 0u; r < ROWS; r++) {
        let first = 32u * step + 4u * w;
        var low = vec4f(0.0);
        var high = vec4f(0.0);
        if (ACTIVATES) {
          low = activated(rows[r], first);
          high = activated(rows[r], first + 16u);
        } else {
          low = inputs(rows[r], first);
          high = inputs(rows[r], first + 16u);
        }
        if (NORMS) {
          square += dot(low, low) + dot(high, high);
          low *= norm_weights(first);
          high *= norm_weights(first + 16u);
        }
        part[r] += vec4f(dot(u.low, low), dot(u.high, high), 0.0, 0.0);
        if (HAS_OFFSETS) { part[r] += vec4f(0.0, 0.0, dot(low, vec4f(1.0)), dot(high, vec4f(1.0))); }
      }
    }
    for (var r = 0u; r < ROWS; r++) { sum[r] += dot(s, part[r]); }
  }
  for (var r = 0u; r < ROWS; r++) { sums[64u * r + lane] = sum[r]; }
  if (NORMS) { squares[lane] = square; }
  workgroupBarrier();
  for (var i = lane; i < 16u * ROWS; i += 64u) {
    let r = i / 16u;
    let at = 64u * r + i % 16u;
    var value = sums[at] + sums[at + 16u] + sums[at + 32u] + sums[at + 48u];
    if (NORMS) {
      value /= sqrt((squares[0] + squares[16] + squares[32] + squares[48]) / f32(K) + EPS);
    }
    put(group.y * ROWS + r, 16u * group.x + i % 16u, value);
  }
}
