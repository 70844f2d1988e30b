"""Loss of a node in a cluster of two nodes with a worker each: ``python -m tests.scale.nodes``."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import ray
from ray.cluster_utils import Cluster
from tests.scale.test_ray_pool import PROMPTS, ids_of
from tests.tiny import tiny_llama

from whet import Engine, SamplingParams
from whet.rollout.ray_pool import RayPool

_SECOND_CLUSTER = """
import sys
from contextlib import closing
import ray
from tests.tiny import tiny_llama
from whet.rollout.ray_pool import RayPool
with closing(RayPool(tiny_llama(), workers=1, threads=1, weights="float32")):
    assert ray.get_runtime_context().gcs_address != sys.argv[1], "an address was not given"
"""


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node = cluster.add_node(num_cpus=1)
    # In another process: actors of a second cluster in one process do not always start, also without Whet.
    subprocess.run([sys.executable, "-c", _SECOND_CLUSTER, cluster.address], check=True)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    model = tiny_llama(num_hidden_layers=4, hidden_size=64, max_position_embeddings=2048)
    sampling = SamplingParams(max_new_tokens=2000, seed=3)
    pool = RayPool(model, workers=2, threads=1, weights="float32")
    pool.sync(model)
    pool.load()
    engine = Engine.from_model(model, weights="float32")
    engine.sync(model)
    expected = ids_of(engine.generate(PROMPTS, 4, sampling))

    seen = []

    def check() -> None:
        seen.append("same" if ids_of(pool.generate(PROMPTS, 4, sampling)) == expected else "different")

    check()
    cluster.add_node(num_cpus=1)  # for the restart of the lost worker

    def lose() -> None:
        time.sleep(0.1)
        cluster.remove_node(node, allow_graceful=False)
        seen.append("lost")

    thread = threading.Thread(target=lose)
    thread.start()
    check()
    thread.join()
    pool.close()
    ray.shutdown()
    cluster.shutdown()
    print("\n" + " ".join(seen))


if __name__ == "__main__":
    main()
