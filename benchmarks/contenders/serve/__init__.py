"""Contenders of the suite "serve": whole servers behind one client, and transformers on the same log-likelihoods."""
