// Inputs of the layers, D elements each, from their projection of the embedding and the second embedding of a token:
// (norm(inputs / sqrt(HIDDEN_DIM)) + sqrt(D) embedded) / sqrt(2).
@group(0) @binding(0) var<storage, read> weight: array<f32>;
@group(0) @binding(1) var<storage, read> embedded: array<f32>;
@group(0) @binding(2) var<storage, read_write> inputs: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let row = (group.y * N_LAYERS + group.x) * D;
  let unit = 1.0 / sqrt(f32(HIDDEN_DIM));
  var squares = 0.0;
  for (var i = lane; i < D; i += 64u) { squares += unit * inputs[row + i] * unit * inputs[row + i]; }
  let scale = unit / sqrt(total(lane, squares) / f32(D) + EPS);
  for (var i = lane; i < D; i += 64u) {
    inputs[row + i] = sqrt(0.5) * (inputs[row + i] * scale * weight[i] + sqrt(f32(D)) * embedded[row + i]);
  }
}
