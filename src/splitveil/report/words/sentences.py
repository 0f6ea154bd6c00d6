"""Sentences that depend on the runs, and the captions of pictures."""

SENTENCES = {
    "statement.one": (
        "One model trained on {datasets}: how well the answers hold, and how much of the picture "
        "an attacker recovers from the smashed data that the client sends.",
        "一个在 {datasets} 上训练的模型：回答有多准，"
        "攻击者又能从客户端发出的中间特征里恢复多少图像。",
    ),
    "statement.many": (
        "{count} models trained on {datasets}: how well the answers hold, and how much of the "
        "picture an attacker recovers from the smashed data that the client sends.",
        "{count} 个在 {datasets} 上训练的模型：回答有多准，"
        "攻击者又能从客户端发出的中间特征里恢复多少图像。",
    ),
    "statement.unnamed": ("an unnamed dataset", "未命名数据集"),
    "verdict.change": (
        "From {bare} to {best} the strongest attack's error goes from {before} to {after} "
        "(ceiling {ceiling}), accuracy from {start} % to {end} %.",
        "从{bare}到{best}，最强攻击的误差由 {before} 变为 {after}（上限 {ceiling}），"
        "准确率由 {start} % 变为 {end} %。",
    ),
    "verdict.seeds": (
        "“{name}” (mean ± sd of {count} seeds)",
        "“{name}”（{count} 个种子的均值 ± 标准差）",
    ),
    "verdict.audits": ("“{name}” (mean of {count} audits)", "“{name}”（{count} 次审计的均值）"),
    "verdict.one": (
        "{name} answers with {accuracy} % accuracy, and the strongest attack ({attack}) rebuilds "
        "its images with an error of {mse} where the label alone gives {ceiling}: a leakage of "
        "{leakage} %.",
        "{name}的准确率为 {accuracy} %；最强攻击（{attack}）重建图像的误差为 {mse}，"
        "仅凭标签的上限是 {ceiling}，即泄露 {leakage} %。",
    ),
    "verdict.best": (
        "Of {count} audited runs {name} gives the least away: {accuracy} % accuracy, and the "
        "strongest attack ({attack}) has an error of {mse} where the label alone gives {ceiling}; "
        "without an undefended run nothing says what the defence gained.",
        "在 {count} 个已审计的运行中，{name}泄露最少：准确率 {accuracy} %，最强攻击（{attack}）"
        "的误差为 "
        "{mse}，仅凭标签的上限是 {ceiling}；没有未设防的运行作对照，无法说明防御带来了多少改善。",
    ),
    "verdict.undefended": (
        "None of the {count} audited runs has a defence: at best, {name}, the strongest attack "
        "({attack}) has an error of {mse} where the label alone gives {ceiling}.",
        "这 {count} 个已审计的运行都没有防御，其中最好的{name}，最强攻击（{attack}）的误差为 "
        "{mse}，"
        "仅凭标签的上限是 {ceiling}。",
    ),
    "verdict.mixed": (
        "The {count} audited runs were not measured on the same images, so no verdict ranks them.",
        "这 {count} 个已审计的运行并非在相同图像上测得，因此不作排名结论。",
    ),
    "verdict.none": (
        "Nothing was audited yet, so there is no verdict.",
        "尚无审计记录，因此没有结论。",
    ),
    "caveat.one-seed": (
        "One training seed only ({names}): there is no confidence interval, and small differences "
        "may be chance.",
        "只有一个训练随机种子（{names}）：没有置信区间，微小差异可能只是偶然。",
    ),
    "caveat.seeds": (
        "Several training seeds ({names}): each is a row of its own; the verdict takes their mean.",
        "有多个训练随机种子（{names}）：每个种子各占一行，结论取其均值。",
    ),
    "caveat.attacks": ("Attacks that were run: {names}.", "已运行的攻击：{names}。"),
    "caveat.profile": (
        "Audit profile (budget of the attacks): {names}.",
        "审计档位（攻击预算）：{names}。",
    ),
    "caveat.knowledge": ("Knowledge “{aux}”: {meaning}.", "攻击者知识“{aux}”：{meaning}。"),
    "aux.train": (
        "the attacker knows the whole training set (the strongest knowledge)",
        "攻击者掌握全部训练集（最强的知识）",
    ),
    "aux.held-out": (
        "the attacker knows images that were never shown to the defender",
        "攻击者掌握防御方从未见过的图像",
    ),
    "aux.test90": (
        "the attacker fits on 90 % of the test images and is scored on the other 10 %",
        "攻击者用 90 % 的测试图像拟合，在其余 10 % 上评分",
    ),
    "aux.val": (
        "the attacker knows the training images and is scored on the validation images, by which "
        "settings are chosen",
        "攻击者掌握训练图像，在用于选择设置的验证图像上评分",
    ),
    "aux.other": ("see the passport", "见运行档案"),
    "caveat.scored": ("Images scored: {names}.", "评分图像数：{names}。"),
    "caveat.flags": (
        "Flags were raised on: {names}. Read them before the numbers.",
        "以下运行触发了警示：{names}。请先读警示再看数字。",
    ),
    "caveat.brief": (
        "Less than a standard audit: {names}. A stronger attacker may rebuild more.",
        "审计未达标准档位：{names}。更强的攻击者可能重建得更好。",
    ),
    "caveat.differ": (
        "The runs differ in {what} ({values}): do not compare them row by row.",
        "各运行的{what}不同（{values}）：不要逐行比较。",
    ),
    "differ.dataset": ("dataset", "数据集"),
    "differ.profile": ("audit profile", "审计档位"),
    "differ.aux": ("attacker's knowledge", "攻击者知识"),
    "differ.scored": ("number of scored images", "评分图像数"),
    "caveat.tests": (
        "The runs were scored on different images: see their split hashes.",
        "各运行在不同的图像上评分：见数据划分的哈希。",
    ),
    "caveat.unaudited": (
        "Not audited yet, so without numbers: {names}.",
        "尚未审计，因此没有数字：{names}。",
    ),
    "caveat.last": (
        "An attack that was not run is not covered: a better attacker may recover more. "
        "Attacks are measurements, not certificates.",
        "未运行的攻击不在结论之内：更强的攻击者可能恢复更多。攻击结果是测量值，不是证书。",
    ),
    "caption.tradeoff": (
        "Up and to the right is better. The dashed ceiling is the error of an attacker who knows "
        "the true class and nothing else: a model that answers correctly must give that much away, "
        "so a point near the line leaks almost nothing beyond its answer. The dotted line is the "
        "error of guessing the mean image without looking at the data at all.",
        "越靠右上越好。虚线是上限，即只知道真实类别的攻击者的误差：回答正确的模型必然泄露这么多，"
        "因此靠近虚线的点除了答案几乎不泄露别的。点线是完全不看数据、直接猜平均图像的误差。",
    ),
    "caption.published": (
        "Hollow marks are numbers others published, not measured here: {sources}.",
        "空心标记是他人发表的数字，并非此处测得：{sources}。",
    ),
    "alt.tradeoff": (
        "Scatter plot of accuracy against the strongest attack's mean squared error, with the "
        "label-only ceiling and the mean-image line",
        "准确率与最强攻击均方误差的散点图，含仅凭标签的上限线和平均图像线",
    ),
    "caption.gallery": (
        "For each attack the image it rebuilds best (worst for the defender), the median one and "
        "the one it rebuilds worst, among the scored images saved with the audit. Drag a slider "
        "to lay the original over the reconstruction.",
        "每种攻击各取三张随审计保存的评分图像：重建得最好的（对防御方最差）、居中的和重建得最差的。"
        "拖动滑块可把原图叠到重建图上。",
    ),
    "caption.grid": (
        "The first row holds images the attacker never saw. Each row below is what one attack "
        "rebuilds from the data the client sent, with its mean MSE over all scored images; ★ marks "
        "the strongest attack on each model. **The problem:** on an undefended model the rebuilt "
        "pictures look like the originals, so the server has seen the input. **The cure:** under a "
        "defence that works, what is left looks the same for every image of a class: it shows the "
        "answer, not the picture. ✗ marks a wrong answer of the server.",
        "第一行是攻击者从未见过的图像。下面每行是一种攻击根据客户端发出的数据重建的结果，"
        "并给出全部评分图像的平均 MSE；★ 标出每个模型的最强攻击。**问题所在**：未设防时，"
        "重建图与原图几乎一样，服务器等于看到了输入。**解决之道**：防御有效时，"
        "同一类别的重建图看起来都一样："
        "只显示答案，不显示图像。✗ 表示服务器答错。",
    ),
    "alt.grid": (
        "Grid of images: originals in the first row, below them each attack's "
        "reconstructions, model by model",
        "图像网格：第一行为原图，其下按模型列出每种攻击的重建",
    ),
    "caption.attacks": (
        "Mean MSE of every attack, one bar per model; those that differ in their seeds alone have "
        "one colour. A lower bar is a stronger attack.",
        "每种攻击的平均 MSE，每个模型一根柱；仅种子不同的模型颜色相同。柱越低，攻击越强。",
    ),
    "alt.attacks": (
        "Bar chart of each attack's mean squared error on each model, with the label-only ceiling",
        "各攻击在各模型上的均方误差柱状图，含仅凭标签的上限线",
    ),
    "caption.curves": (
        "Grey: warm-up, the penalty does not act yet. Hatched: the penalty's own early shut-off "
        "held. A dotted line marks where a growing weight reaches its full height.",
        "灰色区域：预热阶段，惩罚项尚未生效。斜线区域：惩罚项自身的提前关闭规则生效。"
        "点线：逐步增大的权重在此达到最大值。",
    ),
    "alt.curves": (
        "Training curves of {names}: accuracy, penalty, intra-class mean squared error and "
        "effective sample size over the epochs",
        "{names} 的训练曲线：各轮次的准确率、惩罚项、类内均方误差与有效样本量",
    ),
}
