r"""What `--help` says. `{program}` becomes the name of the command that these are part of.

A line that holds only \b keeps the paragraph below it as it is written.
"""

APP = """
Ingest long documents once and ask them many times.

\b
  {program} ingest report.txt                        prints the document's id
  {program} ask "Who signed it?" --document DOC_ID   ask it, as often as you like
  {program} ask "Who signed it?" --file report.txt   both in one step

The service's address is --url, or the variable ORTHROS_CLIENT_URL.
"""

EXIT_CODES = """
\b
Exit codes:
  0    done
  1    the service refused or failed; the message names the code and the request
  2    wrong usage, or a file that cannot be read as UTF-8 text
  3    no service was reached, or it did not answer in time
  130  interrupted
"""

INGEST = """
Upload a UTF-8 text file and wait until it can be asked.

Prints the document's id, and nothing else, on standard output.

\b
Examples:
  {program} ingest report.txt
  {program} ingest report.txt --title "Annual report 2025"
  pdftotext report.pdf - | {program} ingest -
  id=$({program} ingest report.txt --quiet)
  {program} ingest report.txt --no-wait --json
"""

ASK = """
Ask a question about one or several documents.

The answer appears as it is written. Below it stand the passages that it rests on, with their
offsets in the stored text, counted in characters.

\b
Examples:
  {program} ask "Who signed the contract?" --document DOC_ID
  {program} ask "What differs?" --document DOC_1 --document DOC_2
  {program} ask "Who signed it?" --file contract.txt
  {program} ask "Who signed it?" --document DOC_ID --json | jq -r .text
"""

SUMMARIZE = """
Summarize one or several documents.

\b
Examples:
  {program} summarize --document DOC_ID
  {program} summarize --file report.txt --style bullets
  {program} summarize --document DOC_ID --focus "what it costs"
"""

COUNT = """
Count a text file's tokens without storing it.

\b
Examples:
  {program} count report.txt
  {program} count report.txt --json | jq .num_tokens
"""

DOCUMENTS = "List, show and delete the documents that the service keeps."

DOCUMENTS_LIST = """
List documents, newest first.

\b
Examples:
  {program} documents list
  {program} documents list --limit 5 --json
"""

DOCUMENTS_GET = """
Show one document and how far its ingestion has come.

\b
Example:
  {program} documents get DOC_ID
"""

DOCUMENTS_DELETE = """
Delete a document, with its text and its state. There is no way back.

\b
Example:
  {program} documents delete DOC_ID
"""
