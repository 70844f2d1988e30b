// Copies pages of keys and values: writes[i] = (page, the page to copy or -1), in order.
@group(0) @binding(0) var<storage, read> params: array<u32>;
@group(0) @binding(1) var<storage, read> writes: array<i32>;
@group(0) @binding(2) var<storage, read_write> kv: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
  if (id.x >= WORDS) { return; }
  for (var i = 0u; i < params[2]; i++) {
    let from_page = writes[2u * i + 1u];
    if (from_page >= 0) { kv[u32(writes[2u * i]) * WORDS + id.x] = kv[u32(from_page) * WORDS + id.x]; }
  }
}
