"""Gives NamedTuples a signature in the reference, as dataclasses have one."""

import griffe


class NamedTuples(griffe.Extension):
    """An extension of griffe, which reads the sources for the reference."""

    def on_class(self, *, cls: griffe.Class, **_: object) -> None:
        """Add `__init__` with a parameter for each field."""
        if "NamedTuple" not in map(str, cls.bases) or "__init__" in cls.members:
            return
        kind = griffe.ParameterKind.positional_or_keyword
        fields = [
            griffe.Parameter(
                member.name,
                annotation=member.annotation,
                kind=kind,
                default=member.value,
            )
            for member in cls.members.values()
            if isinstance(member, griffe.Attribute) and member.annotation is not None
        ]
        parameters = griffe.Parameters(griffe.Parameter("self", kind=kind), *fields)
        cls.set_member(
            "__init__",
            griffe.Function("__init__", parameters=parameters, returns="None"),
        )
