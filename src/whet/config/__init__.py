"""Settings: of the algorithms (``settings``) and of sampling (``sampling``), and the checks of their ``fields``."""

from whet.config.settings import *  # noqa: F403
