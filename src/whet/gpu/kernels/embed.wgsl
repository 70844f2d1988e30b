// x = SCALE times the embedding of a token, if its row is one of FIRST ... FIRST + COUNT. IS_POSITION: x += the embedding
// of its position.
@group(0) @binding(0) var<storage, read> weights: array<u32>;
@group(0) @binding(1) var<storage, read> tokens: array<vec4i>;
@group(0) @binding(2) var<storage, read_write> x: array<f32>;

fn put(at: u32, value: f32) {
  if (IS_POSITION) {
    x[at] += value;
  } else {
    x[at] = SCALE * value;
  }
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let row = u32(select(tokens[group.y].x, tokens[group.y].y, IS_POSITION));
  if (row < FIRST || row >= FIRST + COUNT) { return; }
  let panel = (row - FIRST) / 16u;
  let j = (row - FIRST) % 16u;
  for (var i = lane; i < (K + 31u) / 32u * 4u; i += 64u) {
    let s = scales(panel, i / 4u, j);
    let u = integers(panel, i / 4u, i % 4u, j);
    let at = i / 4u * 32u + i % 4u * 4u;
    for (var b = 0u; b < 4u; b++) {
      if (at + b < K) { put(group.y * K + at + b, s.x * u.low[b] + s.z); }
      if (at + 16u + b < K) { put(group.y * K + at + 16u + b, s.y * u.high[b] + s.w); }
    }
  }
}
