"""Contenders of ``whet bench grpo`` and ``whet bench dpo``: trainers in separate processes."""
