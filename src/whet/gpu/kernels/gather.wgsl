// out[i] = hidden[rows[i]], except where rows[i] is -1.
@group(0) @binding(0) var<storage, read> rows: array<i32>;
@group(0) @binding(1) var<storage, read> hidden: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let row = rows[group.y];
  if (row < 0) { return; }
  for (var i = lane; i < D; i += 64u) { out[group.y * D + i] = hidden[u32(row) * D + i]; }
}
