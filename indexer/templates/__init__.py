"""Records -> segments: documents, ChatML, or any Jinja chat template as Hugging Face renders it.

Loss: of documents, text and EOS. Of conversations, the `{% generation %}` blocks of the template; without them, all that
each assistant turn adds up to its last non-space character, its end token included.
"""

from indexer.templates.opening import open_template, read_chat_template
from indexer.templates.spec import SpecialFlags, Template, TemplateFailure, TemplateSpec

__all__ = ["SpecialFlags", "Template", "TemplateFailure", "TemplateSpec", "open_template", "read_chat_template"]
