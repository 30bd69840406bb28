"""The addresses in the package's metadata, all made from one, `repository` in `pyproject.toml`."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

# a link of Markdown to a file of the repository, with or without a heading in it
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s]+)(?=\))")


class RepositoryLinks(MetadataHookInterface):
    """Adds the project's URLs and the README, whose links lead to the repository."""

    def update(self, metadata: dict[str, object]) -> None:
        """Change the metadata of a build. Hatchling calls it."""
        repository = self.config["repository"]
        files = f"{repository}/blob/main"
        metadata["urls"] = {
            "Source": repository,
            "Documentation": f"{files}/docs/index.md",
            "Changelog": f"{files}/CHANGELOG.md",
            "Security": f"{files}/SECURITY.md",
        }
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": _LINK.sub(rf"{files}/\1", text),
        }
