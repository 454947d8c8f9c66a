"""The reference backend: every case, on every platform."""

from conformance import Conformance


class TestXla(Conformance):
    backend = "xla"
