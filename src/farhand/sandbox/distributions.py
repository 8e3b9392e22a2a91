"""From the name in an import to the distribution that brings it, where the two differ."""

from __future__ import annotations

from farhand.errors import UsageError

_DISTRIBUTIONS = dict(
    line.split()
    for line in """
    attr attrs
    Bio biopython
    bs4 beautifulsoup4
    Crypto pycryptodome
    Cryptodome pycryptodomex
    cairo pycairo
    charset_normalizer charset-normalizer
    community python-louvain
    cv2 opencv-python-headless
    dateutil python-dateutil
    deprecated Deprecated
    discord discord.py
    dns dnspython
    docx python-docx
    dotenv python-dotenv
    engineio python-engineio
    faiss faiss-cpu
    fitz pymupdf
    fontTools fonttools
    fuzzywuzzy fuzzywuzzy
    geopandas geopandas
    git GitPython
    github PyGithub
    gitlab python-gitlab
    google.auth google-auth
    google.cloud.bigquery google-cloud-bigquery
    google.cloud.storage google-cloud-storage
    google.genai google-genai
    google.protobuf protobuf
    googleapiclient google-api-python-client
    graphql graphql-core
    gym gymnasium
    haystack haystack-ai
    ibm_db ibm-db
    igraph igraph
    IPython ipython
    jose python-jose
    jwt PyJWT
    kafka kafka-python
    ldap python-ldap
    Levenshtein Levenshtein
    llama_cpp llama-cpp-python
    lxml_html_clean lxml-html-clean
    magic python-magic
    markdown Markdown
    markdown_it markdown-it-py
    mpl_toolkits matplotlib
    multipart python-multipart
    MySQLdb mysqlclient
    mysql mysql-connector-python
    nacl PyNaCl
    netCDF4 netCDF4
    OpenSSL pyOpenSSL
    osgeo GDAL
    pcre python-pcre
    pil pillow
    PIL pillow
    pkg_resources setuptools
    pptx python-pptx
    psycopg2 psycopg2-binary
    pylab matplotlib
    pymysql PyMySQL
    PyPDF2 PyPDF2
    pythonjsonlogger python-json-logger
    pywt PyWavelets
    rapidfuzz rapidfuzz
    ruamel ruamel.yaml
    sentence_transformers sentence-transformers
    serial pyserial
    shapefile pyshp
    skimage scikit-image
    sklearn scikit-learn
    skopt scikit-optimize
    slack_sdk slack-sdk
    slugify python-slugify
    snappy python-snappy
    socketio python-socketio
    socks PySocks
    sksparse scikit-sparse
    speech_recognition SpeechRecognition
    stdnum python-stdnum
    telegram python-telegram-bot
    typing_extensions typing-extensions
    umap umap-learn
    usb pyusb
    unidecode Unidecode
    vlc python-vlc
    websocket websocket-client
    wx wxPython
    xdg pyxdg
    xlsxwriter XlsxWriter
    yaml PyYAML
    zmq pyzmq
    """.strip().splitlines()
)
_SHARED = frozenset({"google", "azure", "zope", "sphinxcontrib", "backports"})
"""Namespaces that many distributions fill; their top-level name says nothing."""


def distribution_for(import_name: str) -> str:
    """The distribution to install for `import a.b.c`: the longest known prefix decides, else the top-level name."""
    parts = import_name.split(".")
    for end in range(len(parts), 0, -1):
        known = _DISTRIBUTIONS.get(".".join(parts[:end]))
        if known:
            return known
    if parts[0] in _SHARED:
        raise UsageError(
            f"{import_name!r} does not say which distribution brings it: many share the name {parts[0]!r}",
            hint=f"Name the distribution in the environment's packages, for example '{parts[0]}-...'.",
        )
    return parts[0].replace("_", "-")
