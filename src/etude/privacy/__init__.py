"""What may be kept of served conversations, and how it is kept: consent, encrypted capture, erasure. Usable alone, no
torch.

    folder = PrivacyFolder(Path("privacy"))
    folder.consent.set(Subject.parse("acme/bob"), Level.TRAIN)
    writer = CaptureWriter(Path("privacy"))  # etude serve --capture privacy
    folder.erase(Subject.parse("acme/bob"))  # destroys the key: what was captured is unreadable at once

- Consent levels are off (the default), metrics, capture and train, by organisation and by user. The lower one counts.
- Each subject has a key of its own. Records are encrypted with it (AES-256-GCM) and expire.
- `redact_text` hides secrets, addresses and paths from people who look at conversations.

Encryption needs the library `cryptography` (`pip install 'etude[signing]'`)."""

from etude.privacy.consent import Change, ConsentStore, Level
from etude.privacy.folder import Erasure, PrivacyFolder
from etude.privacy.records import Captured, Content, RecordDamaged, SubjectErased
from etude.privacy.redaction import redact_text, redact_value
from etude.privacy.subjects import Subject
from etude.privacy.writer import CaptureWriter

__all__ = [
    "CaptureWriter",
    "Captured",
    "Change",
    "ConsentStore",
    "Content",
    "Erasure",
    "Level",
    "PrivacyFolder",
    "RecordDamaged",
    "Subject",
    "SubjectErased",
    "redact_text",
    "redact_value",
]
