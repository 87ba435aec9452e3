"""A thousand lines of text: words of many languages, emoji, punctuation, empty and odd lines."""

from __future__ import annotations

import random

WORDS = {
    "English": "the weather is fine today although nobody's umbrella would've stayed dry yesterday naïve café re-used e-mail",
    "German": "Straße Übergröße schön Äpfel Öl heißt süß Donaudampfschiffahrt Müller grüßt die Katze größer",
    "French": "garçon élève où déjà l'été cœur français œuvre naïf forêt à bientôt qu'est-ce",
    "Turkish": "ığdır İstanbul şeker çiçek güneş öğretmen ırmak İzmir kağıt üzüm",
    "Vietnamese": "Việt Nam xin chào buổi sáng đường phố người Hà Nội tiếng nước",
    "Polish": "łódź żółć gęś źrebię ćma ślimak Kraków dziękuję świat",
    "Russian": "Привет мир сегодня хорошая погода ёлка чай съешь ещё этих мягких булок Москва",
    "Greek": "Καλημέρα κόσμε ΑΘΗΝΑ θάλασσα ήλιος ΟΔΟΣ ψωμί ελληνικά σήμερα",
    "Arabic": "مرحبا بالعالم السَّلامُ عليكم كتاب جديد مدرسة الطقس جميل اليوم",
    "Hebrew": "שלום עולם בוקר טוב ספר חדש בית ילד מים",
    "Hindi": "नमस्ते दुनिया आज मौसम अच्छा है किताब पानी विद्यालय हिन्दी",
    "Bengali": "নমস্কার পৃথিবী আজ আবহাওয়া ভালো বই জল বাংলা",
    "Thai": "สวัสดีชาวโลก วันนี้ อากาศดี หนังสือ น้ำ โรงเรียน",
    "Chinese": "你好世界 今天天气很好 图书馆 水 学校 我们 漢字 简体",
    "Japanese": "こんにちは世界 今日は天気がいい カタカナ ガギグゲゴ パーティー 東京 ﾊﾝｶｸ です",
    "Korean": "안녕하세요 세계 오늘 날씨가 좋아요 책 물 학교 한국어",
    "Emoji": "😀 👍🏽 👩‍👩‍👧 🇩🇪 ❤️ smile 🎉party☕ ok✅ ☀ ¯\\_(ツ)_/¯",
    "Numbers": "3.14 1,000,000 20% €50 #42 2024-05-06 10:30 ½ x² 5G v1.2.3 +49-30 Ⅷ",
    "Code": "foo_bar() a[i]=b**2; <html> C++ x->y https://example.org/?q=1&r=%20 user@host.org {json: [1,2]} $HOME",
    "Latin": "ﬁne ﬂow ǆ Å Å é é ñ Ñandú Ærø þorn ð ŋ ƒ",
}
ENDS = ("", ".", "!", "?", "…", " ?!", "。", ",", " – ", ' "', "」")
ODD = (
    "",
    " ",
    "\t\n",
    "   leading and trailing   ",
    "a\u200bb zero\u200dwidth",
    "soft\u00adhyphen",
    "no\u00a0break",
    "line\u2028separator",
    "\ufeffmark",
    "bell\u0007and\u0001others",
    "\ufffd replacement",
    "\ue000 private",
    "x" * 150,
    "𝓗𝓮𝓵𝓵𝓸 𝔘𝔫𝔦",
    "Z͑ͫ̓ͪ̂ͫ̽a̴l̵g̶o",
    "[MASK] and [SEP]",
    "<s> </s> <mask> <pad>",
    "<|endoftext|> <|startoftext|>",
    "##hash ## x",
    "tab\tin\tthe middle",
    "two\n\nlines\r\nand more",
    "UPPER lower MiXeD",
    "don't I'll we've they'd it's DON'T I'LL",
    "“quotes” ‘single’ «guillemets»",
)


def thousand_lines() -> list[str]:
    """The lines, always the same: the odd lines, 48 lines of each language, and lines of words of four languages."""
    source = random.Random(5)
    lines = list(ODD)
    for words in (text.split() for text in WORDS.values()):
        for _ in range(48):
            line = " ".join(source.choices(words, k=source.randint(1, 9))) + source.choice(ENDS)
            lines.append(line if source.random() < 0.8 else line.upper())
    while len(lines) < 1000:
        lines.append(" ".join(source.choice(text.split()) for text in source.sample(list(WORDS.values()), 4)))
    return lines
