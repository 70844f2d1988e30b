// Softmax attention of HEADS query heads of one KV head and token over the pages of its sequence, a page at a time.
// A lane has a key of the page, then up to LANE_WORDS words of the output.
@group(0) @binding(0) var<storage, read> tokens: array<vec4i>;
@group(0) @binding(1) var<storage, read> page_table: array<i32>;
@group(0) @binding(2) var<storage, read> qkv: array<f32>;
@group(0) @binding(3) var<storage, read> kv: array<u32>;
@group(0) @binding(4) var<storage, read> sinks: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;
const LANE_WORDS = (KV_WORDS + 63u) / 64u;
const LOWEST = -3e38f;
var<workgroup> queries: array<f32, HEADS * ELEMENTS * KV_WORDS>;
var<workgroup> weights: array<f32, HEADS * 64u>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let token = tokens[group.y];
  let position = u32(token.y);
  let first_head = group.x * HEADS;
  let kv_head = first_head / (N_HEADS / N_KV_HEADS);
  let row = group.y * QKV_DIM + first_head * QUERY_STRIDE;
  for (var i = lane; i < HEADS * ELEMENTS * KV_WORDS; i += 64u) {
    let e = i % (ELEMENTS * KV_WORDS);
    queries[i] = 0.0;
    if (e < D) { queries[i] = SCALE * qkv[row + i / (ELEMENTS * KV_WORDS) * QUERY_STRIDE + e]; }
  }
  workgroupBarrier();
  var begin = 0u;
  if (WINDOW > 0u && position + 1u > WINDOW) { begin = position + 1u - WINDOW; }
  var top = array<f32, HEADS>();
  var sum = array<f32, HEADS>();
  var output = array<vec2f, HEADS * LANE_WORDS>();
  for (var h = 0u; h < HEADS; h++) { top[h] = LOWEST; }
  for (var p = begin / 64u; p <= position / 64u; p++) {
    let page = page_at(page_table[u32(token.z) + p], kv_head);
    let t = 64u * p + lane;
    var score = array<f32, HEADS>();
    for (var w = 0u; w < KV_WORDS; w++) {
      let key = unpack(kv[page + 64u * w + lane]);
      for (var h = 0u; h < HEADS; h++) {
        let at = (h * KV_WORDS + w) * ELEMENTS;
        score[h] += queries[at] * key.x;
        if (KV_BF16) { score[h] += queries[at + ELEMENTS - 1u] * key.y; }
      }
    }
    for (var h = 0u; h < HEADS; h++) {
      if (SOFTCAP > 0.0) { score[h] = SOFTCAP * tanh(clamp(score[h] / SOFTCAP, -20.0, 20.0)); }
      if (t < begin || t > position) { score[h] = LOWEST; }
      weights[64u * h + lane] = score[h];
    }
    workgroupBarrier();
    for (var h = 0u; h < HEADS; h++) {
      let before = top[h];
      for (var i = 0u; i < 64u; i++) { top[h] = max(top[h], weights[64u * h + i]); }
      let scale = exp(before - top[h]);
      sum[h] *= scale;
      for (var w = 0u; w < LANE_WORDS; w++) { output[h * LANE_WORDS + w] *= scale; }
    }
    workgroupBarrier();
    for (var h = 0u; h < HEADS; h++) {
      weights[64u * h + lane] = select(exp(score[h] - top[h]), 0.0, score[h] == LOWEST);
    }
    workgroupBarrier();
    let n = min(64u, position + 1u - 64u * p);
    for (var i = 0u; i < n; i++) {
      for (var h = 0u; h < HEADS; h++) { sum[h] += weights[64u * h + i]; }
      for (var w = 0u; w < LANE_WORDS; w++) {
        if (64u * w + lane >= KV_WORDS) { break; }
        let value = unpack(kv[page + HEAD_WORDS + i * KV_WORDS + 64u * w + lane]);
        for (var h = 0u; h < HEADS; h++) { output[h * LANE_WORDS + w] += weights[64u * h + i] * value; }
      }
    }
    workgroupBarrier();
  }
  for (var h = 0u; h < HEADS; h++) {
    var scale = 1.0;
    if (HAS_SINKS) {
      let sink = sinks[first_head + h];
      let most = max(top[h], sink);
      scale = exp(top[h] - most);
      sum[h] = sum[h] * scale + exp(sink - most);
    }
    for (var w = 0u; w < LANE_WORDS; w++) {
      for (var e = 0u; e < ELEMENTS; e++) {
        let d = (64u * w + lane) * ELEMENTS + e;
        if (d >= D) { break; }
        var value = output[h * LANE_WORDS + w][e] * scale / sum[h];
        if (IS_GATED) { value /= 1.0 + exp(-qkv[row + h * QUERY_STRIDE + D + d]); }
        out[(group.y * N_HEADS + first_head + h) * D + d] = value;
      }
    }
  }
}
