// Norms and gates the results of linear attention, GROUP elements at a time: norm(x) silu(z), or norm(x silu(z)) in
// Mamba-2, whose groups have separate weights.
@group(0) @binding(0) var<storage, read> weight: array<f32>;
@group(0) @binding(1) var<storage, read> rows: array<f32>;
@group(0) @binding(2) var<storage, read_write> x: array<f32>;

fn gate(row: u32, i: u32) -> f32 {
  let z = rows[row * IN_STRIDE + Z + i];
  return z / (1.0 + exp(-z));
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let first = group.x * GROUP;
  let row = group.y * VALUES;
  var squares = 0.0;
  for (var i = first + lane; i < first + GROUP; i += 64u) {
    if (IS_MAMBA) { x[row + i] *= gate(group.y, i); }
    squares += x[row + i] * x[row + i];
  }
  let scale = 1.0 / sqrt(total(lane, squares) / f32(GROUP) + EPS);
  for (var i = first + lane; i < first + GROUP; i += 64u) {
    if (IS_MAMBA) {
      x[row + i] *= scale * weight[i];
    } else {
      x[row + i] *= scale * weight[i - first] * gate(group.y, i);
    }
  }
}
