"""Settings of algorithms and sampling, validation of their fields, and the registry of training algorithms."""

from whet.config.preferences import *  # noqa: F403
from whet.config.settings import *  # noqa: F403
