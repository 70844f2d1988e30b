"""The contenders of ``whet bench grpo`` and ``whet bench dpo``: trainers, each in a process of its own."""
