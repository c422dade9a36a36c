"""Every exception that HEAR raises on purpose, and whose fault each one tells of.

A control that an engine turns down is an outcome on the bus, never an exception here.
"""


class HearError(Exception):
    """Base of all errors raised by HEAR."""


class ProtocolError(HearError):
    """A rule of the protocol was broken."""


class LocalProtocolError(ProtocolError):
    """The calling code asked for something that the protocol forbids. Nothing was changed."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something that the protocol forbids or that cannot be read."""


class BusError(HearError):
    """A bus could not carry a message."""


class LaggedError(BusError):
    """A subscription was closed, since its reader left too many reliable messages unread."""


class EngineError(HearError):
    """An engine or its backend failed."""


class UnservedError(EngineError):
    """An engine is not there, or has gone, and nothing of an answer has come from it.

    So another engine may be asked for the same.
    """


class ConfigError(HearError):
    """A configuration or input file says something that HEAR cannot use."""


class PluginError(HearError):
    """A plug-in is missing, cannot be loaded, or broke its contract."""
