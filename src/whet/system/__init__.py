"""The operating system: differences between Linux, macOS and Windows, behind one interface.

No other module of Python names a system call, a signal or a file of the kernel that not every system has. The core has
the same division (cpp/runtime/system.h).
"""
